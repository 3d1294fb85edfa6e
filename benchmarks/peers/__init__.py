"""The same work in other frameworks, each in a virtual environment of its own."""
