"""Stages whose replicas come from pools of GPUs: measured bandwidth curves, GPUs may stay unused."""
