"""Helpers that several folders of tests share: toy models, engines, references."""
