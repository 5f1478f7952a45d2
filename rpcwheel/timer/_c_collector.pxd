# `_collector.py` for the compiled form of `_base.py`.
cdef extern from "Python.h":
    void PyObject_GC_Track(object)
    void PyObject_GC_UnTrack(object)

cdef enum:
    COMPILED = 1


cdef inline object track(object timeout):
    PyObject_GC_UnTrack(timeout)  # tracking what is tracked already is a fatal error
    PyObject_GC_Track(timeout)


cdef inline object untrack(object timeout):
    PyObject_GC_UnTrack(timeout)
