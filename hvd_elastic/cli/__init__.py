"""The command line: ``app`` is the table of the commands, and a folder holds those of a kind."""
