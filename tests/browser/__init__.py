"""Tests in a real browser; a package, so that a file here may be named like one beside it."""
