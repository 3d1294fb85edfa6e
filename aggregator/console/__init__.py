"""The operator's console: pages over a fleet, in a process of their own. Who is not told to sees
nothing, and who is told to see changes nothing."""
