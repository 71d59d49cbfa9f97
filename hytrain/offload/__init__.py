"""Owns every thread, queue, stream and event of the overlapped update."""
