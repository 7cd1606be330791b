"""Tests of devices: a simulated one that every machine has, and a command for a real one."""
