"""Analysis of traces: how GPU, copies and CPU overlap, what the GPU waits for, what to change.

``load`` reads files as :class:`~hytrain.tools.trace.spans.RankTrace`: hytrain's own
(``hytrain_spans``) and foreign ones (``kineto``). ``kinds`` names what spans occupy, ``causes``
what a GPU waits for. ``graph`` has the dependencies between spans, ``blockers`` the cause of every
idle interval, ``step_times`` what is hidden, exposed and blocking, ``replay`` the ceilings of
fixes. ``analysis`` combines these, ``report_text`` puts them in words, ``viewer`` draws them.
"""
