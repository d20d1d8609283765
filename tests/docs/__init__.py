"""Every code block and command of README.md and docs/ is run, or says why it is not.

blocks finds them; commands reads the lines of a block that are commands; given has the files that a page takes as
given; warm has the processes that run them, without importing torch again; page plays a page from top to bottom;
reasons lists what is not run, and why.
"""
