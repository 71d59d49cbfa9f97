"""Stages whose replicas come from pools of GPUs, by measured bandwidth; GPUs may stay unused."""
