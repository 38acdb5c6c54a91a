/* The native exchange for spin: two ranks, and a parent that may end all waits. One access of shared memory a step.
 * Sleeps have no deadline: a lost wake is an invalid end state. A mutation is a macro; see test_exchange_model.py. */
#define ROUNDS 5

#ifdef ONE_SLOT
#define AT(rank, s) (2 * (rank))
#else
#define AT(rank, s) (2 * (rank) + (s) % 2)
#endif

byte head[4], tail[4], number[4]; /* of both slots of both ranks */
byte bell[2];
bool waiting[2], asleep[2]; /* asleep is the kernel's */
bool stop;

proctype rank(bit me)
{
    byte s = 1, seen, rung;
    bool flag;

    do
    :: s > ROUNDS -> break
    :: else ->
        if
        :: stop -> goto out
        :: else
        fi;
#ifdef NUMBER_FIRST
        number[AT(me, s)] = s;
#endif
        head[AT(me, s)] = s;
        tail[AT(me, s)] = s;
#ifdef NO_FENCE /* then the load of the flag may overtake the store of the number */
        flag = waiting[1 - me];
        number[AT(me, s)] = s;
#else
        number[AT(me, s)] = s;
        flag = waiting[1 - me];
#endif
        if
        :: flag ->
#ifndef NO_RING
            bell[1 - me]++;
#endif
            asleep[1 - me] = false
        :: else
        fi;
look:
        seen = number[AT(1 - me, s)];
        if
        :: seen == s -> goto arrived
        :: else
        fi;
        assert(seen == (s > 2 -> s - 2 : 0));
        if
        :: stop -> goto out
        :: else
        fi;
        if
        :: goto look /* the spin may go on, or end, at any time */
        :: rung = bell[me]
        fi;
        waiting[me] = true;
#ifndef NO_SECOND_LOOK
        seen = number[AT(1 - me, s)];
        if
        :: seen == s -> waiting[me] = false; goto arrived
        :: else
        fi;
        if
        :: stop -> goto out
        :: else
        fi;
#endif
        atomic { /* the kernel compares and puts to sleep */
            if
            :: bell[me] == rung -> asleep[me] = true
            :: else
            fi
        };
        !asleep[me];
        waiting[me] = false;
        goto look;
arrived:
        assert(head[AT(1 - me, s)] == s);
        assert(tail[AT(1 - me, s)] == s);
        s++
    od;
out:
    waiting[me] = false
}

proctype parent()
{
    if
    :: skip /* it never stops anything */
    ::
#ifndef RING_BEFORE_STOP
        stop = true;
#endif
        bell[0]++;
        asleep[0] = false;
        bell[1]++;
        asleep[1] = false;
#ifdef RING_BEFORE_STOP
        stop = true
#endif
    fi
}

init
{
    atomic {
        run rank(0);
        run rank(1);
        run parent()
    }
}
