"""Other libraries' files: heads and dumps read and written, converted, and explained."""
