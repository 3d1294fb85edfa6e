/* Opens: can recorded ones keep a device from its session?
 *
 * One device, one aggregator, and a network that has every open ever made. The device tries again and
 * again. An attempt is a chance when the network does its part once: it shows the device the presence
 * of the aggregator's present life, and carries this attempt's open, its reply and the first envelope
 * under the new session, while neither end dies. Before, between and after, it replays what it likes.
 * What a chance is good for is judged; an attempt that is no chance counts as lost.
 *
 * Old rule: the last MEMORY opens are remembered, a new session takes a token, and of waiting sessions
 * the oldest gives way. New rule: an open names the aggregator's life and a counter. One of another
 * life, or not above all that were granted in this one, is refused for nothing. The same bytes again
 * get the same reply while their session waits.
 *
 * Tokens come back faster than the device makes opens: REFILL of them with each attempt, at least two.
 *
 * The device writes its counter down before it sends. Its home may be set back to any earlier moment;
 * so the counter's step doubles with each attempt that had no answer, up to MOST_STEP.
 */
#include "common.pml"

#define COSTS_ONCE   1  /* no open costs public-key work, a token, or a place twice */
#define KEEPS_ITS_PLACE 2  /* a session that waits gives way to no replay (homes not set back) */
#define NO_LOCK_OUT  3  /* chances fail no more often than lost attempts and set-back homes explain */

#ifndef OPENS
#define OPENS 6         /* made in all */
#endif
#ifndef TOKENS
#define TOKENS 3        /* the bucket */
#endif
#ifndef REFILL
#define REFILL 2        /* tokens that come back with each attempt */
#endif
#ifndef MEMORY
#define MEMORY 2        /* old rule: opens remembered */
#endif
#ifndef WAITING
#define WAITING 2       /* old rule: sessions that wait */
#endif
#ifndef DEATHS
#define DEATHS 1        /* of the aggregator */
#endif
#ifndef CRASHES
#define CRASHES 1       /* of the device */
#endif
#ifndef SET_BACKS
#define SET_BACKS 1     /* of the device's home */
#endif
#define MOST_STEP 4
#define PATIENCE 3      /* attempts until a counter set back by less than 2^PATIENCE is high enough */

/* What the network has: open n was made in a life, with a counter. */
byte made;
byte life_of[OPENS + 1], counter_of[OPENS + 1];
bool worked[OPENS + 1];         /* ghost: it cost public-key work */

/* The aggregator, all of it in memory. */
byte life = 1;
byte highest;                   /* new rule: the highest counter granted in this life */
byte tokens = TOKENS;
byte waiting[WAITING];          /* opens whose sessions wait, oldest first; 0 for none */
byte memory[MEMORY];
byte live;                      /* the open whose session lives */

/* The device: life and counter are durable. */
byte known_life, counter, step = 1;

byte deaths, crashes, set_backs, lost, failed;
bool answered, chance;
byte mine;

#define IS_WAITING(n) (waiting[0] == n || waiting[1] == n)
#define STALE(n) (life_of[n] != life || counter_of[n] <= highest)
#define REFUSED_FOR_NOTHING(n) (OLD -> IS_REMEMBERED(n) : STALE(n))
#define IS_REMEMBERED(n) (memory[0] == n || memory[1] == n)

inline grant(n) {
    tokens--;
    CLAIM(COSTS_ONCE, !worked[n]);
    worked[n] = true;
    if
    :: OLD ->
        memory[0] = memory[1]; memory[1] = n;
        if
        :: waiting[0] == 0 -> waiting[0] = n
        :: waiting[0] != 0 && waiting[1] == 0 -> waiting[1] = n
        :: else -> waiting[0] = waiting[1]; waiting[1] = n
        fi
    :: !OLD -> waiting[0] = n
    fi
}

/* An open comes; `granted` says whether there is a reply. */
inline open_comes(n, granted) {
    if
    :: IS_WAITING(n) -> granted = true                       /* the same reply */
    :: !IS_WAITING(n) && REFUSED_FOR_NOTHING(n) -> granted = false
    :: !IS_WAITING(n) && !REFUSED_FOR_NOTHING(n) && tokens == 0 ->
        printf("aggregator: open %d is refused, too many came\n", n);
#ifdef MARK_BEFORE_TOKEN        /* What if an open that found no token could not come again? */
        highest = counter_of[n];
#endif
        granted = false
    :: !IS_WAITING(n) && !REFUSED_FOR_NOTHING(n) && tokens > 0 ->
        printf("aggregator: open %d is granted a session, which waits\n", n);
        highest = counter_of[n];
        grant(n);
        granted = true
    fi
}


inline forget_sessions() {
    waiting[0] = 0; waiting[1] = 0; memory[0] = 0; memory[1] = 0;
    highest = 0; live = 0; tokens = TOKENS
}

/* What the network and bad luck do between any two steps of an attempt. */
inline meanwhile() {
    do
    :: made > 0 -> atomic {
        select (n : 1 .. made);
        if
        :: n != mine -> printf("network: replays open %d\n", n); open_comes(n, ignored)
        :: else
        fi;
        n = 0; ignored = false
        }
    :: deaths < DEATHS -> d_step {
        printf("aggregator: dies and starts again\n");
        deaths++; life++; forget_sessions(); chance = false
        }
    :: crashes < CRASHES -> d_step {
        printf("device: dies and starts again\n");
        crashes++; step = 1; chance = false
        }
    :: set_backs < SET_BACKS && counter > 0 -> atomic {
        printf("device: its home is set back\n");
        set_backs++; step = 1; chance = false;
        select (n : 0 .. counter - 1);
        counter = n;
        n = 0
        }
    :: break
    od
}

active proctype world() {
    byte n;
    bool ignored;
    do
    :: made < OPENS -> atomic {
        if
        :: known_life = life; chance = true
        :: known_life != 0 && known_life != life -> chance = false   /* knows no newer presence */
        fi;
        counter = counter + step;
        made++; life_of[made] = known_life; counter_of[made] = counter; mine = made;
        printf("device: makes open %d, counter %d of life %d\n", mine, counter, known_life);
        answered = false
        };
        meanwhile();
        atomic {
            if
            :: printf("network: carries open %d\n", mine); open_comes(mine, answered)
            :: chance = false
            fi
        };
        meanwhile();
        atomic {
            if
            :: answered -> skip
            :: answered -> answered = false; chance = false           /* the reply is lost */
            :: !answered -> skip
            fi
        };
        meanwhile();
        atomic {
            if
            :: answered && chance ->
                CLAIM(KEEPS_ITS_PLACE, IS_WAITING(mine) || set_backs > 0);
                if
                :: IS_WAITING(mine) ->
                    printf("device: has a session\n");
                    live = mine; waiting[0] = 0; waiting[1] = 0
                :: else -> failed++
                fi
            :: !answered && chance -> printf("device: had a chance, and has no session\n"); failed++
            :: !chance -> lost++
            fi;
            if
            :: answered -> step = 1
            :: else -> step = MIN(2 * step, MOST_STEP)
            fi;
            CLAIM(NO_LOCK_OUT, failed <= lost + (set_backs > 0 -> PATIENCE : 0));
            tokens = MIN(tokens + REFILL, TOKENS);
            answered = false; chance = false; mine = 0
        }
    :: else -> break
    od
}
