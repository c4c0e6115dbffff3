/* The all-gather before a step over shared memory (moe_serve/engine/step/exchange.py), under all schedules. For SPIN.

   A rank writes its row, then a flag, into one of two buffers in turn, and reads the rows of all once their flags are
   there. Nothing is acknowledged: a rank that passes one exchange shows that it has read the one before.

   The last rank may stop anywhere. Others may give it up where they miss it; they show the next epoch, and go on without
   it once all but the lost one have (regroup.pml has how they agree). It comes back between two steps, in a third epoch.

   Mistakes, each of which must be caught: FLAG_FIRST a flag before its row; ONE_BUFFER the same buffer in each step;
   KEPT_FLAGS flags without an epoch; UNCHECKED rows are
   used without a look at the others' pages; HASTY a rank begins an epoch before the others have left the one before. */

#define LOST (R - 1)
#define ALL ((1 << R) - 1)
#ifdef ONE_BUFFER
#define AT(r, n) ((r) * BUFFERS)
#else
#define AT(r, n) ((r) * BUFFERS + (n) % BUFFERS)
#endif
#ifdef KEPT_FLAGS
#define FLAG(n) (n)
#else
#define FLAG(n) (epoch * 16 + (n))
#endif
#define VALUE(n) (epoch * 16 + (n))
#define IN(r) (members >> (r) & 1)
#define HAS(r, n) (!IN(r) || flag[AT(r, n)] == FLAG(n))
#define LEFT(r) ((r) != me && IN(r) && proposed[r] > epoch)
#define VOID (LEFT(0) || LEFT(1) || LEFT(R - 1))
#define IS_RIGHT(r, n) (!IN(r) || row[AT(r, n)] == VALUE(n))

byte flag[R * BUFFERS], row[R * BUFFERS], proposed[R];
bool asks;
byte ready;

proctype rank(byte me)
{
    byte n, epoch, members = ALL;
    bool is_right;
again:
    n = 1;
    do
    :: n <= STEPS ->
#ifdef FLAG_FIRST
        flag[AT(me, n)] = FLAG(n); row[AT(me, n)] = VALUE(n);
#else
        row[AT(me, n)] = VALUE(n); flag[AT(me, n)] = FLAG(n);
#endif
        if
        :: HAS(0, n) && HAS(1, n) && HAS(R - 1, n)
        :: !(HAS(0, n) && HAS(1, n) && HAS(R - 1, n)) && VOID -> goto left
        :: !HAS(LOST, n) && me != LOST && epoch == 0 -> goto left
        fi;
        is_right = IS_RIGHT(0, n); /* not at once: others may be in the next exchange by now */
        is_right = is_right && IS_RIGHT(1, n);
        is_right = is_right && IS_RIGHT(R - 1, n);
#ifndef UNCHECKED
        if
        :: me == LOST && VOID && epoch == 0 -> goto left /* the others mask it */
        :: else
        fi;
#endif
        assert(is_right);
        n++
    :: else -> break
    od;
end_of_steps:
    if
    :: epoch == 0 && VOID -> goto left
    :: epoch == 1 && asks -> /* the same step plan for all */
        ready++;
        (ready == R - 1);
        proposed[me] = 2;
        (proposed[0] == 2 && proposed[1] == 2 && proposed[LOST] == 2);
        atomic { epoch = 2; members = ALL }
        goto again
    fi;
left:
    n = 0;
    if
    :: me == LOST ->
        asks = true;
end_masked:
        (ready == R - 1);
        atomic { proposed[me] = 2; epoch = 2 }
        (proposed[0] == 2 && proposed[1] == 2)
    :: else ->
        proposed[me] = 1;
#ifndef HASTY
        (proposed[0] == 1 && proposed[R - 2] == 1);
#endif
        atomic { epoch = 1; members = ALL & ~(1 << LOST) }
    fi;
    goto again
}

init
{
    byte i;
    atomic {
        do
        :: i < R -> run rank(i); i++
        :: else -> break
        od
    }
}
