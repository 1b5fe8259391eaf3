"""Outside suites: SCXML documents loaded as charts and run by the kernel and its interpreters.

SCXML is no format of the library: the loader is test code. It maps constructs of SCXML to the
keys of a chart and to logic, and leaves all decisions about states and events to the kernel.
"""
