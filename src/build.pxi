# The id of the build, which _build.py explains.  Part of every module.

cdef extern from "build.h":
    const char qkv_build[]

BUILD = qkv_build.decode()
