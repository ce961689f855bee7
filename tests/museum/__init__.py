"""A museum of faults that public engines had, each as a one-line change of this engine's own source.

`exhibit` holds the machinery, `scenes` the workloads, and one module a room the exhibits. `python -m tests.museum`
prints the catalogue.

Proof: tests/test_museum.py.
"""
