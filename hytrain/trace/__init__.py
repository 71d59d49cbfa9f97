"""Recording of traces: spans, counters and flows of chosen steps (formats/trace_file.py)."""
