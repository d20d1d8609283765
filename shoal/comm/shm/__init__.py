"""Workers of one host meet in shared memory: `join` makes a SharedGroup of them. Linux only."""
