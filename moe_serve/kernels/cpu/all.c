/* The library: all kernels, with one pool. */
#include "gemm.c"
#include "experts.c"
#include "calls.c"
#include "moves.c"
#include "attention.c"
#include "rows.c"
#include "gate.c"
#include "sampling.c"

/* Threads of this process's pool from now on, the caller's included. */
i64 set_threads(i64 threads)
{
    atomic_store(&pool.threads, threads);
    return 0;
}

i64 vector_form(void) { return FORM; }
