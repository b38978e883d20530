/* test_lanes4.c - kernel.h with vectors of 4 blocks, by instructions that most CPUs have: see lanes.h. */
#define LANES_WANTED 4
#include "lanes.h"
