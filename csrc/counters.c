/* counters.c - how often each key value has sealed in this process. */
#include "counters.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "agsf.h"

/*
 * Counters are numbered, and stand in chunks, which never move. A hash is found through a table of numbers, open
 * addressing with linear probing. There are some tables, by the first bits of the hash, so that no caller waits while a
 * large one grows. Tables are between 3/5 and 4/5 full: 16 bytes of counter and at most 4 * 5/3 of table for each key
 * value.
 */
enum {
    CHUNK_COUNTERS = 1024,
    TABLE_BITS = 6,
    TABLE_MIN_SLOTS = 16,
    COUNT_BITS = 33, /* up to AGSF_KEY_LIMIT, which is 2^32 */
};

#define COUNT_MASK ((UINT64_C(1) << COUNT_BITS) - 1)

/* Either count has 31 bits of the hash above it, which never change. The table's number has the other two bits. */
struct agsf_counter {
    _Atomic uint64_t sealed;
    _Atomic uint64_t before; /* by other processes, as told */
};

struct table {
    uint32_t *slots; /* 0, or a counter's number and 1 more */
    uint32_t nslots, nused;
};

static struct table tables[1 << TABLE_BITS];
static agsf_counter **chunks;
static uint32_t ncounters;

static agsf_counter *counter_at(uint32_t number) { return &chunks[number / CHUNK_COUNTERS][number % CHUNK_COUNTERS]; }

static uint64_t high_bits(uint64_t hash) { return hash >> 31 << COUNT_BITS; }
static uint64_t low_bits(uint64_t hash) { return hash << COUNT_BITS; }

static struct table *table_of(uint64_t hash) { return &tables[hash >> (64 - TABLE_BITS)]; }

/* All but the first two bits, which are of the table's number. */
static uint64_t hash_of(const agsf_counter *counter) {
    const uint64_t high = atomic_load_explicit(&counter->sealed, memory_order_relaxed) >> COUNT_BITS;
    const uint64_t low = atomic_load_explicit(&counter->before, memory_order_relaxed) >> COUNT_BITS;

    return high << 31 | low;
}

/* The slot that has the hash's counter, or the free one where it belongs. */
static uint32_t find_slot(const struct table *table, uint64_t hash) {
    const uint64_t wanted = hash & UINT64_MAX >> 2;
    uint32_t slot =
        (uint32_t)((hash & UINT32_MAX) * table->nslots >> 32); /* the low bits, evenly over any number of slots */

    while (table->slots[slot] != 0 && hash_of(counter_at(table->slots[slot] - 1)) != wanted) {
        slot = slot + 1 < table->nslots ? slot + 1 : 0;
    }
    return slot;
}

/* Makes a table larger by a third. Without memory for that, the table still works, only slower, until it is full. */
static bool grow(struct table *table) {
    const uint32_t nslots = table->nslots == 0 ? TABLE_MIN_SLOTS : table->nslots + table->nslots / 3;
    struct table bigger = {.slots = calloc(nslots, sizeof(*bigger.slots)), .nslots = nslots, .nused = table->nused};

    if (bigger.slots == NULL) return table->nused + 1 < table->nslots; /* a free slot ends each search */
    for (uint32_t i = 0; i < table->nslots; i++) {
        if (table->slots[i] != 0)
            bigger.slots[find_slot(&bigger, hash_of(counter_at(table->slots[i] - 1)))] = table->slots[i];
    }
    free(table->slots);
    *table = bigger;
    return true;
}

/* Room for one more counter. */
static bool add_chunk(void) {
    const uint32_t nchunks = ncounters / CHUNK_COUNTERS;
    agsf_counter **more;

    if (ncounters % CHUNK_COUNTERS != 0) return true;
    if (ncounters > UINT32_MAX - CHUNK_COUNTERS) return false;
    more = realloc(chunks, (nchunks + 1) * sizeof(*chunks));
    if (more == NULL) return false;
    chunks = more;
    chunks[nchunks] = malloc(CHUNK_COUNTERS * sizeof(*chunks[nchunks]));
    return chunks[nchunks] != NULL;
}

agsf_counter *agsf_counter_find(uint64_t hash, bool make) {
    struct table *const table = table_of(hash);
    agsf_counter *counter;
    uint32_t slot;

    if (table->nslots > 0) {
        slot = find_slot(table, hash);
        if (table->slots[slot] != 0) return counter_at(table->slots[slot] - 1);
    }
    if (!make) return NULL;
    if (table->nused >= table->nslots / 5 * 4 && !grow(table)) return NULL;
    if (!add_chunk()) return NULL;
    counter = counter_at(ncounters);
    atomic_init(&counter->sealed, high_bits(hash));
    atomic_init(&counter->before, low_bits(hash));
    slot = find_slot(table, hash);
    table->slots[slot] = ++ncounters;
    table->nused++;
    return counter;
}

uint64_t agsf_counter_sealed(agsf_counter *counter) { return atomic_load(&counter->sealed) & COUNT_MASK; }

void agsf_counter_carry(agsf_counter *counter, uint64_t sealed_before) {
    uint64_t told = atomic_load(&counter->before);

    while ((told & COUNT_MASK) < sealed_before) {
        if (atomic_compare_exchange_weak(&counter->before, &told, (told & ~COUNT_MASK) | sealed_before)) break;
    }
}

bool agsf_counter_reserve(agsf_counter *counter, uint64_t messages) {
    uint64_t sealed = atomic_load(&counter->sealed);

    do {
        const uint64_t used = (sealed & COUNT_MASK) + (atomic_load(&counter->before) & COUNT_MASK);
        if (used > AGSF_KEY_LIMIT || messages > AGSF_KEY_LIMIT - used) return false;
    } while (!atomic_compare_exchange_weak(&counter->sealed, &sealed, sealed + messages));
    return true;
}
