"""An engine as a program of its own: its flags, its command line, its life, and what it must report."""
