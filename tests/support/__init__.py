"""Helpers that several test directories use. This package has no tests."""
