/* Roots: do devices follow when the root key is replaced, and only then?
 *
 * The old root signs that the new one takes its place. The aggregator shows the last LINKS of these
 * successions before its descriptor. A device that trusts any root named there follows to the last
 * one, and trusts only that from then on. A thief takes the root in force, or one that was replaced
 * and not destroyed, and signs a successor of his own for it. He has the broker, too.
 *
 * Old rule: there are no successions; a device trusts the root of its code, for ever.
 */
#include "common.pml"

#define FOLLOWS    1   /* whom the thief did not get, the aggregator's message leads to its root */
#define NEVER_BACK 2   /* nobody is led astray by a root that it has left behind */
#define ONE_KEEPS_FAITH 3  /* nobody is led astray by a root that was replaced when it was stolen */

#ifndef ROOTS
#define ROOTS 4
#endif
#ifndef LINKS
#define LINKS 3        /* as many as there are rotations */
#endif
#define DEVICES 2

byte root = 1;
byte taken;            /* the root that the thief has; 0 for none */
bool was_replaced;     /* it was, when he took it */
byte trusts[DEVICES];  /* 0: it has no code yet */
bool astray[DEVICES];
byte furthest[DEVICES];/* ghost: the highest root that it trusted */

active proctype world() {
    byte d, r;
    do
    :: root < ROOTS -> d_step {
        root++; printf("operator: replaces the root by root %d\n", root)
        }
    :: taken == 0 -> atomic {
        select (r : 1 .. root);
        taken = r; was_replaced = r < root;
        printf("thief: takes root %d\n", taken);
        r = 0
        }
    :: atomic {
        select (d : 0 .. DEVICES - 1);
        if
        :: trusts[d] == 0 ->
            printf("device %d: has a code, which names root %d\n", d, root);
            trusts[d] = root; furthest[d] = root
        :: trusts[d] != 0 && !astray[d] ->
            printf("device %d: sees the aggregator's message of root %d\n", d, root);
            if
            :: !OLD && trusts[d] + LINKS >= root -> trusts[d] = root; furthest[d] = root
            :: else
            fi;
            CLAIM(FOLLOWS, trusts[d] == root)
        :: else
        fi;
        d = 0
        }
    /* The thief's message may name every root up to his, and then his own successor. */
    :: taken != 0 -> atomic {
        select (d : 0 .. DEVICES - 1);
        if
        :: trusts[d] != 0 && !astray[d] && trusts[d] <= taken && !OLD ->
            printf("device %d: follows the thief\n", d);
            CLAIM(NEVER_BACK, furthest[d] <= taken);
            CLAIM(ONE_KEEPS_FAITH, !was_replaced);
            astray[d] = true
        :: else
        fi;
        d = 0
        }
    od
}
