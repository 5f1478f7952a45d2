"""Threads, event loops and callbacks that the other packages share."""
