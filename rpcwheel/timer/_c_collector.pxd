# `_collector.py` for the compiled form of `_front.py`.
cdef extern from "Python.h":
    void PyObject_GC_UnTrack(object)

cdef enum:
    COMPILED = 1


cdef inline object untrack(object timeout):
    PyObject_GC_UnTrack(timeout)
