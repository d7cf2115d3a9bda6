"""Runs that can be killed and continued: their folders, their seeds, their display, and means over seeds."""
