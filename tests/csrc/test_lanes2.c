/* test_lanes2.c - kernel.h with vectors of 2 blocks, by instructions that most CPUs have: see lanes.h. */
#define LANES_WANTED 2
#include "lanes.h"
