"""Every update is counted at most once, and committed before its receipt is sent."""
