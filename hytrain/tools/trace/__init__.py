"""What a trace says: how well GPU, copies and CPU overlap, what the GPU waits for, what to change.

``load`` makes :class:`~hytrain.tools.trace.spans.RankTrace` of files, ours (``hytrain_spans``) and
foreign ones (``kineto``). ``kinds`` names what spans occupy, ``causes`` what a GPU waits for;
``graph`` has the dependencies between spans, ``blockers`` the cause of every idle interval,
``step_times`` what is hidden, exposed and blocking, ``replay`` the ceilings of fixes; ``analysis``
puts it together, ``report_text`` tells it, ``viewer`` draws it.
"""
