"""What is said: every message of the protocol, its topic, and the form in which it is cut."""
