/* Keys: what can stolen ones still do, once they were replaced?
 *
 * The root's delegate signs descriptors, each with keys of its own. The aggregator renews its
 * descriptor (the next serial), or the operator rotates the delegation (serials above all that the
 * last delegate could use). A thief looks at the aggregator's disk and takes every key that lies
 * there. He has the broker, too: a device sees the descriptors that he shows, and nothing else.
 *
 * One device gets a code, uses it whenever it likes, and sleeps when it likes: then its clock stands.
 * What clocks that are set do is in clock.pml.
 *
 * Old rule: enrolment asks neither serial nor expiry, and keys stay on the disk for ever. New rule:
 * the code binds the least serial and the time when it was made, a descriptor below that serial or
 * expired by then is refused, and keys are erased when their grace is over.
 *
 * RUNS_ON   another old rule: the largest time that the device was told runs on, for good, and the
 *           next descriptor is judged by it, too. New rule: an estimate, which the next reply replaces,
 *           and the largest time that was signed under the descriptor in hand
 */
#include "common.pml"

#define NO_OLD_ENROLMENT 1 /* nobody enrols by keys that were replaced or expired before its code */
#define NO_OLD_SERVICE   2 /* nobody is served by keys older than a descriptor he has seen, or than his
                            * code, or that had ended when that was made */
#define NOTHING_TO_STEAL 3 /* no key lies on the disk after its grace */
#define TIME_IS_BOUNDED  4 /* a device's time is ahead of the world's by less than a descriptor's life */
#define IS_SERVED        5 /* who meets the aggregator with its present descriptor is served */
#define ENDS_BY_ITSELF   6 /* a thief serves no longer than his descriptor lasts by the device's clock */

#ifdef RUNS_ON
#define FALLS false
#else
#define FALLS true
#endif

#ifndef TIMES
#define TIMES 6            /* the clock of the world: 0 .. TIMES - 1 */
#endif
#ifndef DESCRIPTORS
#define DESCRIPTORS 3
#endif
#ifndef DELEGATES
#define DELEGATES 2
#endif
#define LIFE 3             /* of a descriptor */
#define DELEGATION 5       /* of a delegation */
#define GRACE 1

/* A serial's place in the order of all serials: of delegate d, d * 8 + 1 ... d * 8 + 6 are descriptors
 * of the aggregator, and d * 8 + 7 stands for whatever a thief who has the delegate signs. */
#define FORGED(d) ((d) * 8 + 7)
#define SERIALS ((DELEGATES + 1) * 8)

byte now;
byte serial;                     /* in force */
byte delegate = 1, made;
byte expires[SERIALS];           /* 0: there is no such descriptor */
byte honoured[SERIALS];          /* until then its keys are used; 0: no end is set */
bool stolen[SERIALS];
bool theft;

byte code_serial, code_time;     /* 0: no code was made */
bool enrolled;
byte seen;                       /* the device's newest serial */
byte signed_time;                /* the largest that was signed under that one */
byte estimate;                   /* the device's time, from the last reply; 0: there was none */
byte awake;                      /* ghost: how long it was awake since it enrolled */

#define ON_DISK(s) (expires[s] > 0 && (OLD || honoured[s] == 0 || honoured[s] > now))

inline issue() {
    if
    :: serial > 0 -> honoured[serial] = MIN(now + GRACE, expires[serial])
    :: else -> skip
    fi;
    made++;
    serial = delegate * 8 + made;
    expires[serial] = MIN(now + LIFE, delegated + DELEGATION);
    printf("%d aggregator: descriptor %d until %d\n", now, serial, expires[serial])
}

inline steal(with_delegate) {
    for (i : 1 .. SERIALS - 1) {
        if
        :: ON_DISK(i) ->
            printf("%d thief: takes the keys of %d\n", now, i);
            CLAIM(NOTHING_TO_STEAL, honoured[i] == 0 || honoured[i] > now);
            stolen[i] = true
        :: else
        fi
    }
    i = 0;
    if
    :: with_delegate ->
        printf("%d thief: takes the delegate, and signs %d\n", now, FORGED(delegate));
        stolen[FORGED(delegate)] = true;
        expires[FORGED(delegate)] = delegated + DELEGATION
    :: else
    fi;
    theft = true
}

/* Whether the device takes descriptor s for an enrolment, and for a session. */
#define LARGEST MAX(signed_time, estimate)
#define ENROLS_BY(s) (expires[s] > 0 \
    && (OLD || (s >= code_serial && expires[s] > MAX(signed_time, code_time))))
#define TAKES(s) (expires[s] > 0 && s >= seen && (OLD || (FALLS && s > seen) \
    || expires[s] > (FALLS -> signed_time : LARGEST)))
#define SERVES(s) (s != 0 && s % 8 != 7 && (s == serial || honoured[s] > now) && expires[s] > now)

/* The device hears a time under descriptor s, which it takes: not past the descriptor's end. What was
 * signed under the one before counts no more. */
inline hear(s, time) {
    if
    :: FALLS && s > seen -> signed_time = 0
    :: else
    fi;
    seen = s;
    if
    :: expires[s] > MAX((FALLS -> signed_time : LARGEST), time) ->
        estimate = (FALLS -> time : MAX(LARGEST, time));
        signed_time = MAX(signed_time, time)
    :: else
    fi;
    CLAIM(TIME_IS_BOUNDED, LARGEST < now + LIFE)
}

inline meet_thief(s) {
    if :: time = 0 :: time = expires[s] - 1 fi;         /* the best that he can say: too little, too much */
    if
    :: !enrolled && ENROLS_BY(s) ->
        printf("%d device: enrols with the thief, by the keys of %d, who says it is %d\n", now, s, time);
        CLAIM(NO_OLD_ENROLMENT, expires[s] > code_time);
        CLAIM(NO_OLD_ENROLMENT, s >= code_serial);
        enrolled = true; seen = s;
        if :: OLD :: else -> signed_time = MAX(signed_time, code_time) fi;
        hear(s, time)
    :: enrolled && TAKES(s) && expires[s] > time ->
        printf("%d device: opens a session with the thief, by the keys of %d, who says it is %d\n", now, s, time);
        CLAIM(NO_OLD_SERVICE, s >= seen && s >= code_serial && expires[s] > code_time);
        CLAIM(ENDS_BY_ITSELF, CHECK == 0 || expires[s] > code_time + awake);
        hear(s, time)
    :: else
    fi;
    time = 0
}

inline meet_aggregator(s) {
    if
    :: SERVES(s) && !enrolled && ENROLS_BY(s) ->
        printf("%d device: enrols, by the keys of %d\n", now, s);
        enrolled = true; seen = s; signed_time = MAX(signed_time, code_time);
        hear(s, now)
    :: SERVES(s) && enrolled ->
        if
        :: TAKES(s) && expires[s] > now ->
            printf("%d device: opens a session, by the keys of %d\n", now, s);
            hear(s, now)
        :: else ->
            printf("%d device: refuses the aggregator's descriptor %d\n", now, s);
            CLAIM(IS_SERVED, s != serial)
        fi
    :: else
    fi
}

active proctype world() {
    byte i, time, delegated;
    d_step { issue() };
    do
    :: made < DESCRIPTORS -> d_step { issue() }
    :: made < DESCRIPTORS && delegate < DELEGATES -> d_step {
        delegate++; delegated = now;
        printf("%d operator: rotates the keys, and the delegation\n", now);
        issue()
        }
    :: now < TIMES - 1 -> atomic {
        now++;
        if
        :: enrolled ->                            /* awake; its time runs on */
            awake++;
            if :: estimate > 0 -> estimate++ :: else fi
        :: skip
        fi
        }
    :: !theft -> d_step { steal(false) }
#ifdef DELEGATE_TOO                               /* What if the delegate's key is taken as well? */
    :: !theft -> d_step { steal(true) }
#endif
    :: code_serial == 0 && expires[serial] > now -> d_step {
        printf("%d operator: makes a code, least serial %d\n", now, serial);
        code_serial = serial; code_time = now
        }
    :: code_serial > 0 -> atomic {
        select (i : 1 .. SERIALS - 1);
        if
        :: stolen[i] -> meet_thief(i)
        :: SERVES(i) -> meet_aggregator(i)
        :: else
        fi;
        i = 0
        }
    :: else -> break
    od
}
