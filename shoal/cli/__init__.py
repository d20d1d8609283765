"""The command line: a parser, and one file a verb."""
