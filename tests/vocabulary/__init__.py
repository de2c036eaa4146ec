"""Tests of `Vocabulary`."""
