"""Private: threads and event loops, and how work gets to them."""
