"""Random configurations: a case is drawn from a seed, trained, and repeated in plain torch.

`drawing.py` draws a :class:`~fuzz.cases.Case`; `player.py` trains it on every rank and notes what
it sees; `judge.py` walks through the same script with a plain model and a serial update and
compares; `refusals.py` lists keys that are refused; `run.py` is the command.
"""
