"""Outside measures of the kernel: public suites, XState in step, a reference interpreter."""
