"""The lowest room: errors, units, files, TOML, events and the run folder."""
