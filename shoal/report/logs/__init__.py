"""The event logs of a run, read with distrust, and what their steps come to."""
