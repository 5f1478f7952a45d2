# `_native.py` in C.
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc
from libc.stdlib cimport free as free_memory

cdef extern from "Python.h":
    void PyObject_GC_Track(object)
    void PyObject_GC_UnTrack(object)

cdef extern from *:
    """
    #if defined(_MSC_VER)
    #include <intrin.h>
    static __inline int rpcwheel_lowest_bit(unsigned __int64 bits) {
        unsigned long position;
        _BitScanForward64(&position, bits);
        return (int)position;
    }
    #else
    #define rpcwheel_lowest_bit(bits) __builtin_ctzll(bits)
    #endif
    #if defined(__GNUC__)
    #define rpcwheel_prefetch(object) (__builtin_prefetch(object, 1), __builtin_prefetch((char *)(object) + 56, 1))
    #else
    #define rpcwheel_prefetch(object) ((void)(object))
    #endif
    """
    void prefetch "rpcwheel_prefetch" (object)
    int lowest_bit "rpcwheel_lowest_bit" (uint64_t bits) nogil

cdef enum:
    COMPILED = 1


cdef inline object track(object timeout):
    PyObject_GC_UnTrack(timeout)  # tracking what is tracked already is a fatal error
    PyObject_GC_Track(timeout)


cdef inline object untrack(object timeout):
    PyObject_GC_UnTrack(timeout)


cdef inline int64_t* integers(Py_ssize_t count) except NULL:
    cdef void* array = calloc(count, sizeof(int64_t))
    if array is NULL:
        raise MemoryError()
    return <int64_t*> array


cdef inline uint64_t* bitmap(Py_ssize_t slots) except NULL:
    return <uint64_t*> integers(slots // 64 + 1)


cdef inline object free(void* array):
    free_memory(array)


cdef inline Py_ssize_t bucket(int64_t* bounds, int64_t value) noexcept:
    cdef Py_ssize_t index = 0
    while bounds[index] < value:
        index += 1
    return index


cdef inline int64_t floor(double value) noexcept:  # exact: it fits 64 bits and is not negative
    return <int64_t> value
