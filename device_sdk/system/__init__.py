"""What both ends need of the machine: files that survive a crash, locks, clocks, safe text, and
what all commands are on the command line."""
