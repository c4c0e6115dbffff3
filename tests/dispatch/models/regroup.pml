/* How the ranks of a host agree on who goes on (moe_serve/dispatch/membership.py), under all schedules. For SPIN.

   Each rank shows an epoch and the ranks that it masks. It waits until all that it has not masked propose the same, or
   gives up whom it misses; its proposal only grows by that of others, but not by one that masks itself. Then it appends
   its set to the log, and the first record of an epoch is the answer for all. Any rank may suspect any other one, once,
   so a rank that is late or dead anywhere is among all that happens. How a masked rank comes back is in step_exchange.pml.

   Ranks that begin an epoch have its one decision, and every member has left the epoch before. SPIN also sees that nobody
   waits for ever, whoever has died.

   Mistakes, each of which must be caught: OWN_WORD a rank goes on with what it proposes, whatever the log says;
   NO_WAIT a rank decides without waiting for the others. */

#define ALL ((1 << R) - 1)
#define MASKS(set, r) ((set) >> (r) & 1)
#define NONE 255

byte proposed[R], masked[R];       /* pages */
byte decided[EPOCHS + 1];          /* the log: set of masked ranks, NONE: no record yet */
byte entered[EPOCHS + 1];          /* ranks that have begun an epoch */
bool is_dead[R];
byte suspicions;

proctype rank(byte me)
{
    byte epoch = 1, set, r, waiting;
again:
end_of_step:
    if /* the step is void for this rank: it suspects another one, or sees that a member has left */
    :: suspicions < SUSPICIONS ->
        atomic {
            suspicions++;
            if
            :: set = set | 1 << ((me + 1) % R)
            :: set = set | 1 << ((me + 2) % R)
            fi
        }
    :: proposed[(me + 1) % R] >= epoch || proposed[(me + 2) % R] >= epoch
    :: suspicions < SUSPICIONS -> atomic { suspicions++; is_dead[me] = true; goto dead }
    fi;
propose:
    atomic { masked[me] = set; proposed[me] = epoch }
    do
    :: decided[epoch] != NONE -> break
    :: decided[epoch] == NONE ->
        atomic {
            r = 0; waiting = 0;
            do
            :: r < R && r != me && !MASKS(set, r) && proposed[r] <= epoch ->
                if
                :: proposed[r] == epoch && !MASKS(masked[r], me) ->
                    set = set | masked[r];
                    if
                    :: masked[r] != set -> waiting = waiting | 1 << r
                    :: else
                    fi
                :: else -> waiting = waiting | 1 << r
                fi;
                r++
            :: r < R && !(r != me && !MASKS(set, r) && proposed[r] <= epoch) -> r++
            :: else -> break
            od;
            waiting = waiting & ~set; masked[me] = set; r = 0
        }
#ifdef NO_WAIT
        waiting = 0;
#endif
        if
        :: waiting == 0 -> break
        :: waiting && decided[epoch] == NONE -> /* at the deadline, or where the process is dead */
            if
            :: atomic { set = set | waiting; waiting = 0; masked[me] = set }
            :: true -> waiting = 0 /* looks again */
            fi
        :: waiting && decided[epoch] != NONE
        fi
    od;
    waiting = 0;
    atomic { /* appends, then reads the first record */
        if
        :: decided[epoch] == NONE -> decided[epoch] = set
        :: else
        fi
    }
#ifndef OWN_WORD
    set = decided[epoch];
#endif
    if
    :: MASKS(set, me) -> goto dead
    :: else
    fi;
    atomic {
        assert(set == decided[epoch]);
        r = 0;
        do
        :: r < R -> assert(MASKS(set, r) || proposed[r] >= epoch); r++
        :: else -> break
        od;
        r = 0; entered[epoch] = entered[epoch] | 1 << me;
        epoch++
    }
    if
    :: epoch <= EPOCHS
    :: else -> goto dead
    fi;
    goto again;
dead:
    skip
}

init
{
    byte i;
    atomic {
        do
        :: i <= EPOCHS -> decided[i] = NONE; i++
        :: else -> break
        od;
        i = 0;
        do
        :: i < R -> run rank(i); i++
        :: else -> break
        od
    }
}
