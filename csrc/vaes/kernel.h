/*
 * kernel.h - AES-GCM for one vector width. vaes128.c, vaes256.c and vaes512.c compile it, each with its own vectors.
 *
 * How it works. The text goes through in batches of 8 vectors. All 8 are encrypted side by side, because an AES
 * instruction waits four cycles for its result but starts twice a cycle. Behind each of the first 8 rounds stands one
 * vector's share of GHASH, which other units of the CPU compute meanwhile: opening hashes the batch at hand, sealing
 * the one before. GHASH is a polynomial in the hash key H. Each block of a batch is multiplied by its own power of H,
 * which the key has ready, so the products add up without waiting for each other, and one reduction serves them all.
 * A product takes three multiplications instead of four (Karatsuba): the powers' halves are kept added up as well.
 *
 * A message that fits a batch together with its AAD is one such sum and one reduction. Its tag's mask comes with its
 * key stream, in the batch's last block. Everything else goes through in pieces.
 *
 * Blocks of GHASH are polynomials whose bits are in reverse order. Turned byte by byte, a block becomes a number whose
 * product with another lacks a shift by one. The powers are kept shifted, so that nothing else has to be.
 *
 * What it does in constant time: everything. No branch and no address depends on a key, a text or a tag, only on sizes
 * and on whether a tag was right. AES and the multiplication are instructions without tables.
 *
 * What it wipes: key stream, parts of texts that it copied, and the message's state. What it cannot wipe: what the
 * compiler spilled to the stack for want of registers, and the registers themselves.
 *
 * The empty asm statements hold compilers back. Without them GCC 12 spills the products of a batch, folds one load into
 * two multiplications, and keeps round keys in registers that it does not have. Each cost an earlier version of this
 * code 5 to 12 % on Zen 3. A new compiler may find another way to be slow: tests/test_machine_code.py looks for it, and
 * benchmarks/kernel.sh measures.
 */
#ifndef ALWAYS_INLINE
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#endif
#ifndef PUBLIC
#define PUBLIC(a) ((void)0) /* for test_secrets.c: what is done next may depend on this much of a secret */
#endif
#define UNROLL _Pragma("GCC unroll 8")
#define IN_THIS_ORDER() __asm__ volatile("" ::: "memory")

enum {
    BLOCK = AGSF_VAES_BLOCK_NBYTES,
    VECTORS = 8,          /* of a batch */
    SHORTEST_ROUNDS = 10, /* of AES-128: one for each vector, and two */
    VECTOR_NBYTES = LANES * BLOCK,
    BATCH = VECTORS * LANES, /* blocks of a batch, and powers of the hash key */
    BATCH_NBYTES = VECTORS * VECTOR_NBYTES,
    NONCE_NBYTES = 12,
    FIRST_COUNTER = 2, /* 1 is the tag's mask */
};

_Static_assert(sizeof(((agsf_vaes_key *)NULL)->powers) / BLOCK >= BATCH + LANES, "a key has too few powers");
_Static_assert(sizeof(agsf_vaes_message) % BLOCK == 0, "wipe() goes by blocks");

typedef agsf_vaes_key gcm_key;
typedef agsf_vaes_message gcm_message;

static size_t count_blocks(size_t nbytes) { return nbytes / BLOCK + (nbytes % BLOCK != 0); }

/* ---------------------------------------------------------------- bytes and vectors */

ALWAYS_INLINE __m128i load_block(const uint8_t *at) { return _mm_loadu_si128((const void *)at); }
ALWAYS_INLINE void store_block(uint8_t *at, __m128i block) { _mm_storeu_si128((void *)at, block); }

/* The compiler cannot leave this out, nor make a call or a slow `rep stos` of it. nbytes is a multiple of a block. */
ALWAYS_INLINE void wipe(uint8_t *at, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += BLOCK) {
        store_block(at + i, _mm_setzero_si128());
        IN_THIS_ORDER();
    }
}

/* The same for a whole batch. */
ALWAYS_INLINE void wipe_batch(uint8_t *at) {
    UNROLL for (size_t i = 0; i < VECTORS; i++) {
        vec_store(at + i * VECTOR_NBYTES, vec_zero());
        IN_THIS_ORDER();
    }
}

/* Copies less than a vector. A call of memcpy() would take longer. */
ALWAYS_INLINE void copy_part(uint8_t *out, const uint8_t *in, size_t nbytes) {
    size_t at = 0;

    for (; nbytes - at >= BLOCK; at += BLOCK) store_block(out + at, load_block(in + at));
    for (size_t size = BLOCK / 2; size > 0; size /= 2) {
        if (!(nbytes & size)) continue;
        for (size_t i = 0; i < size; i++) out[at + i] = in[at + i];
        at += size;
    }
}

/* A vector that begins with nbytes from `at`; the rest of it is zeros. */
ALWAYS_INLINE vec load_part(const uint8_t *at, size_t nbytes) {
    uint8_t bytes[VECTOR_NBYTES];
    vec part;

    vec_store(bytes, vec_zero());
    copy_part(bytes, at, nbytes);
    IN_THIS_ORDER();
    part = vec_load(bytes);
    wipe(bytes, sizeof(bytes));
    return part;
}

ALWAYS_INLINE void store_part(uint8_t *at, vec part, size_t nbytes) {
    uint8_t bytes[VECTOR_NBYTES];

    vec_store(bytes, part);
    copy_part(at, bytes, nbytes);
    wipe(bytes, sizeof(bytes));
}

/* The vector with zeros from nbytes on. */
ALWAYS_INLINE vec first_bytes(vec a, size_t nbytes) {
    static const uint8_t window[2 * VECTOR_NBYTES] = {[0 ... VECTOR_NBYTES - 1] = 0xff};

    return vec_and(a, vec_load(window + VECTOR_NBYTES - nbytes));
}

/* A block in the order of bytes that GHASH computes with, and back. */
ALWAYS_INLINE __m128i turning(void) { return _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
ALWAYS_INLINE __m128i turned_block(__m128i block) { return _mm_shuffle_epi8(block, turning()); }
ALWAYS_INLINE vec turned(vec a) { return vec_shuffle(a, vec_all(turning())); }

/* ---------------------------------------------------------------- GHASH */

/* Products that are not yet added up across a vector's lanes, nor reduced. */
struct products {
    vec low, mid, high;
};

ALWAYS_INLINE struct products no_products(void) { return (struct products){vec_zero(), vec_zero(), vec_zero()}; }

/* Adds turned blocks times the powers from place `power` on. The place counts from the key's highest power. */
ALWAYS_INLINE void multiply(struct products *sum, const gcm_key *key, size_t power, vec blocks) {
    vec powers = vec_load(key->powers[power]), folded = vec_load(key->folded[power]);

    VEC_KEEP(powers);
    VEC_KEEP(folded);
    sum->low = vec_xor(sum->low, vec_clmul(blocks, powers, 0x00));
    sum->high = vec_xor(sum->high, vec_clmul(blocks, powers, 0x11));
    sum->mid = vec_xor(sum->mid, vec_clmul(vec_xor(blocks, vec_swap(blocks)), folded, 0x00));
    VEC_KEEP(sum->low);
    VEC_KEEP(sum->mid);
    VEC_KEEP(sum->high);
}

/* One of two steps that bring 256 bits down to 128: it cancels the lowest 64 bits. */
ALWAYS_INLINE __m128i cancel_low(__m128i a) {
    const __m128i polynomial = _mm_set1_epi64x((long long)UINT64_C(0xc200000000000000));

    return _mm_xor_si128(_mm_shuffle_epi32(a, 0x4e), _mm_clmulepi64_si128(a, polynomial, 0x00));
}

ALWAYS_INLINE __m128i reduced(__m128i low, __m128i mid, __m128i high) {
    mid = _mm_xor_si128(mid, _mm_xor_si128(low, high));
    low = _mm_xor_si128(low, _mm_slli_si128(mid, 8));
    high = _mm_xor_si128(high, _mm_srli_si128(mid, 8));
    return _mm_xor_si128(high, cancel_low(cancel_low(low)));
}

ALWAYS_INLINE __m128i reduced_sum(const struct products *sum) {
    return reduced(vec_sum(sum->low), vec_sum(sum->mid), vec_sum(sum->high));
}

/* Adds bytes, the last block of which is filled up with zeros, to products; `before` is added to the first block. */
ALWAYS_INLINE void multiply_bytes(struct products *sum, const gcm_key *key, size_t power, __m128i before,
                                  const uint8_t *in, size_t nbytes) {
    vec first = vec_first(before);

    for (size_t at = 0; at < nbytes; at += VECTOR_NBYTES, power += LANES) {
        const size_t left = nbytes - at;
        const vec blocks = left < VECTOR_NBYTES ? load_part(in + at, left) : vec_load(in + at);
        multiply(sum, key, power, vec_xor(turned(blocks), first));
        first = vec_zero();
    }
}

/* The sum (turned) after more bytes, the last block of which is filled up with zeros. */
static __m128i hashed(const gcm_key *key, __m128i sum, const uint8_t *in, size_t nbytes) {
    while (nbytes > 0) {
        const size_t here = nbytes < BATCH_NBYTES ? nbytes : BATCH_NBYTES;
        struct products products = no_products();
        multiply_bytes(&products, key, BATCH - count_blocks(here), sum, in, here);
        sum = reduced_sum(&products);
        in += here;
        nbytes -= here;
    }
    return sum;
}

/* The last block of GHASH, turned: the sizes in bits. */
ALWAYS_INLINE __m128i sizes_block(uint64_t aad_nbytes, uint64_t nbytes) {
    const uint64_t aad_nbits = aad_nbytes * 8, nbits = nbytes * 8;

    return _mm_set_epi64x((long long)aad_nbits, (long long)nbits);
}

/* ---------------------------------------------------------------- AES */

#define STEP(n) {0, 0, 0, n}
#define STEPS4(n) STEP(n), STEP((n) + 1), STEP((n) + 2), STEP((n) + 3)
#define STEPS16(n) STEPS4(n), STEPS4((n) + 4), STEPS4((n) + 8), STEPS4((n) + 12)

/* How far each block's counter is from the batch's first, and from there to the tag's mask in place of the last. */
static const uint32_t steps[AGSF_VAES_MAX_POWERS][4] = {STEPS16(0), STEPS16(16)};
static const uint32_t back_to_mask[LANES][4] = {[LANES - 1] = STEP((uint32_t)1 - FIRST_COUNTER - (BATCH - 1))};
static const uint32_t one_batch[4] = STEP(BATCH);

/* Counters are little-endian until the last moment: as 32-bit numbers they wrap around as GCM wants. */
ALWAYS_INLINE __m128i counter_of(const uint8_t *nonce, uint32_t counter) {
    uint8_t bytes[BLOCK];

    memcpy(bytes, nonce, NONCE_NBYTES);
    memcpy(bytes + NONCE_NBYTES, &counter, sizeof(counter));
    return load_block(bytes);
}

ALWAYS_INLINE __m128i counter_order(void) { return _mm_set_epi8(12, 13, 14, 15, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

ALWAYS_INLINE __m128i encrypted_block(const gcm_key *key, __m128i block) {
    block = _mm_xor_si128(block, load_block(key->rounds[0]));
    for (size_t i = 1; i < key->nrounds; i++) block = _mm_aesenc_si128(block, load_block(key->rounds[i]));
    return _mm_aesenclast_si128(block, load_block(key->rounds[key->nrounds]));
}

ALWAYS_INLINE vec round_key(const gcm_key *key, size_t i) { return vec_all(load_block(key->rounds[i])); }

/* Counters, with the first round's key. With a mask, the last block is the counter of the tag's mask. */
ALWAYS_INLINE void begin_batch(vec *block, const gcm_key *key, vec counter, bool with_mask) {
    const vec first = round_key(key, 0), order = vec_all(counter_order());

    UNROLL for (size_t i = 0; i < VECTORS; i++) {
        vec here = vec_add32(counter, vec_load((const uint8_t *)steps[i * LANES]));
        if (with_mask && i == VECTORS - 1) here = vec_add32(here, vec_load((const uint8_t *)back_to_mask));
        block[i] = vec_xor(vec_shuffle(here, order), first);
    }
}

ALWAYS_INLINE void one_round(vec *block, const gcm_key *key, size_t number) {
    const vec round = round_key(key, number);

    UNROLL for (size_t i = 0; i < VECTORS; i++) block[i] = vec_aes(block[i], round);
    IN_THIS_ORDER();
}

/*
 * All rounds but the last. Meanwhile it adds the batch at `hash` to *sum, if it hashes. That is for the compiler to
 * know: where clang 19 and newer have to ask a pointer, they move the rounds behind all products. The rounds that only
 * long keys have come first, when no sums take up registers.
 */
ALWAYS_INLINE void rounds(vec *block, const gcm_key *key, bool hashes, const uint8_t *hash, __m128i *sum) {
    struct products products = no_products();
    size_t number = 1;

    while (number + SHORTEST_ROUNDS <= key->nrounds) one_round(block, key, number++);
    UNROLL for (size_t i = 0; i < VECTORS; i++) {
        one_round(block, key, number++);
        if (hashes) {
            const vec blocks = turned(vec_load(hash + i * VECTOR_NBYTES));
            multiply(&products, key, i * LANES, i == 0 ? vec_xor(blocks, vec_first(*sum)) : blocks);
        }
    }
    one_round(block, key, number);
    if (hashes) *sum = reduced_sum(&products);
}

/* Encrypts or decrypts a batch. */
ALWAYS_INLINE void crypt_batch(const gcm_key *key, vec counter, bool hashes, const uint8_t *hash, __m128i *sum,
                               const uint8_t *in, uint8_t *out) {
    vec block[VECTORS], last;

    begin_batch(block, key, counter, false);
    rounds(block, key, hashes, hash, sum);
    last = round_key(key, key->nrounds);
    UNROLL for (size_t i = 0; i < VECTORS; i++) {
        block[i] = vec_aes_last(block[i], vec_xor(last, vec_load(in + i * VECTOR_NBYTES)));
    }
    UNROLL for (size_t i = 0; i < VECTORS; i++) vec_store(out + i * VECTOR_NBYTES, block[i]);
}

/* The key stream of a batch. Whoever wants less of it pays little for the rest: see how long one instruction waits. */
ALWAYS_INLINE void make_stream(const gcm_key *key, vec counter, bool with_mask, uint8_t *stream) {
    vec block[VECTORS], last;

    begin_batch(block, key, counter, with_mask);
    rounds(block, key, false, NULL, NULL);
    last = round_key(key, key->nrounds);
    UNROLL for (size_t i = 0; i < VECTORS; i++) { vec_store(stream + i * VECTOR_NBYTES, vec_aes_last(block[i], last)); }
}

/*
 * Encrypts or decrypts with a key stream at hand. Adds the sealed side to products, its last block filled up with
 * zeros, and `before` to its first block.
 */
ALWAYS_INLINE void mix(struct products *sum, const gcm_key *key, size_t power, __m128i before, bool seal,
                       const uint8_t *stream, const uint8_t *in, size_t nbytes, uint8_t *out) {
    vec first = vec_first(before);

    for (size_t at = 0; at < nbytes; at += VECTOR_NBYTES, power += LANES) {
        const size_t left = nbytes - at;
        vec old, new;
        if (left >= VECTOR_NBYTES) {
            old = vec_load(in + at);
            new = vec_xor(old, vec_load(stream + at));
            vec_store(out + at, new);
        } else {
            old = load_part(in + at, left);
            new = first_bytes(vec_xor(old, vec_load(stream + at)), left);
            store_part(out + at, new, left);
        }
        multiply(sum, key, power, vec_xor(turned(seal ? new : old), first));
        first = vec_zero();
    }
}

/* ---------------------------------------------------------------- keys */

/* AES's S-box of each byte of a word: the last round does that, and its other steps do nothing to four equal words. */
static uint32_t substituted(uint32_t word) {
    const __m128i words = _mm_aesenclast_si128(_mm_set1_epi32((int)word), _mm_setzero_si128());

    return (uint32_t)_mm_cvtsi128_si32(words);
}

/* FIPS 197, section 5.2. The words are little-endian here, so the standard's rotations go the other way. */
static void expand(gcm_key *key, const uint8_t *bytes, size_t key_nbytes) {
    const size_t nwords = key_nbytes / 4, nrounds = nwords + 6, nall = 4 * (nrounds + 1);
    uint32_t words[4 * (AGSF_VAES_MAX_ROUNDS + 1)] = {0};
    uint32_t constant = 1;

    memcpy(words, bytes, key_nbytes);
    for (size_t i = nwords; i < nall; i++) {
        uint32_t word = words[i - 1];
        if (i % nwords == 0) {
            word = substituted(word >> 8 | word << 24) ^ constant;
            constant = constant << 1 ^ (constant >> 7) * 0x11b;
        } else if (nwords == 8 && i % nwords == 4) {
            word = substituted(word);
        }
        words[i] = words[i - nwords] ^ word;
    }
    memcpy(key->rounds, words, sizeof(words));
    key->nrounds = nrounds;
    wipe((uint8_t *)words, sizeof(words));
}

/* The block times x, in GHASH's order of bits. */
static __m128i shifted(__m128i block) {
    const __m128i polynomial = _mm_set_epi64x((long long)UINT64_C(0xc200000000000000), 1);
    const __m128i carried = _mm_shuffle_epi32(_mm_srai_epi32(block, 31), 0xff);
    const __m128i twice = _mm_or_si128(_mm_slli_epi64(block, 1), _mm_slli_si128(_mm_srli_epi64(block, 63), 8));

    return _mm_xor_si128(twice, _mm_and_si128(carried, polynomial));
}

static __m128i folded_halves(__m128i a) { return _mm_xor_si128(a, _mm_shuffle_epi32(a, 0x4e)); }

static void raise_powers(gcm_key *key) {
    const __m128i hash = turned_block(encrypted_block(key, _mm_setzero_si128()));
    const __m128i factor = shifted(hash);
    __m128i power = hash;

    for (size_t i = BATCH; i-- > 0;) {
        const __m128i kept = shifted(power);
        store_block(key->powers[i], kept);
        store_block(key->folded[i], folded_halves(kept));
        power = reduced(_mm_clmulepi64_si128(power, factor, 0x00),
                        _mm_clmulepi64_si128(folded_halves(power), folded_halves(factor), 0x00),
                        _mm_clmulepi64_si128(power, factor, 0x11));
    }
}

static void key_init(gcm_key *key, const uint8_t *bytes, size_t key_nbytes) {
    memset(key, 0, sizeof(*key));
    expand(key, bytes, key_nbytes);
    raise_powers(key);
}

/* ---------------------------------------------------------------- messages in pieces */

/* Writes to out, but remembers the sealed side: bytes of the block whose key stream the message holds. */
static void mix_bytes(gcm_message *message, size_t have, const uint8_t *in, size_t nbytes, uint8_t *out) {
    for (size_t i = 0; i < nbytes; i++) {
        const uint8_t old = in[i], new = old ^ message->stream[have + i];
        message->block[have + i] = message->seal ? new : old;
        out[i] = new;
    }
}

/* Hashes the first nbytes of the message's unfinished block, filled up with zeros. */
static void hash_block(gcm_message *message, size_t nbytes) {
    store_block(message->sum, hashed(message->key, load_block(message->sum), message->block, nbytes));
}

static void begin(gcm_message *message, const gcm_key *key, const uint8_t *nonce, bool seal) {
    wipe((uint8_t *)message, sizeof(*message));
    message->key = key;
    message->seal = seal;
    message->counter = FIRST_COUNTER;
    memcpy(message->nonce, nonce, NONCE_NBYTES);
}

static void add_aad(gcm_message *message, const uint8_t *aad, size_t nbytes) {
    const size_t have = (size_t)(message->aad_nbytes % BLOCK), room = BLOCK - have;
    size_t whole;

    if (nbytes == 0) return;
    message->aad_nbytes += nbytes;
    if (have > 0) {
        const size_t here = nbytes < room ? nbytes : room;
        memcpy(message->block + have, aad, here);
        if (here < room) return;
        hash_block(message, BLOCK);
        aad += here;
        nbytes -= here;
    }
    whole = nbytes - nbytes % BLOCK;
    store_block(message->sum, hashed(message->key, load_block(message->sum), aad, whole));
    memcpy(message->block, aad + whole, nbytes - whole);
}

/* Whole batches of a piece, as many as there are; returns their bytes. */
static size_t crypt_batches(gcm_message *message, const uint8_t *in, size_t nbytes, uint8_t *out) {
    const vec step = vec_all(load_block((const uint8_t *)one_batch));
    const size_t n = nbytes / BATCH_NBYTES;
    vec counter = vec_all(counter_of(message->nonce, message->counter));
    __m128i sum = load_block(message->sum);

    if (n == 0) return 0;
    if (message->seal) {
        crypt_batch(message->key, counter, false, NULL, &sum, in, out);
        for (size_t i = 1; i < n; i++) {
            counter = vec_add32(counter, step);
            in += BATCH_NBYTES;
            out += BATCH_NBYTES;
            crypt_batch(message->key, counter, true, out - BATCH_NBYTES, &sum, in, out);
        }
        sum = hashed(message->key, sum, out, BATCH_NBYTES);
    } else {
        for (size_t i = 0; i < n; i++) {
            crypt_batch(message->key, counter, true, in, &sum, in, out);
            counter = vec_add32(counter, step);
            in += BATCH_NBYTES;
            out += BATCH_NBYTES;
        }
    }
    store_block(message->sum, sum);
    message->counter += (uint32_t)(n * BATCH);
    return n * BATCH_NBYTES;
}

/* What is left of a piece behind its batches: less than a batch. */
static void crypt_rest(gcm_message *message, const uint8_t *in, size_t nbytes, uint8_t *out) {
    const size_t whole = nbytes - nbytes % BLOCK;
    const gcm_key *const key = message->key;
    uint8_t stream[BATCH_NBYTES];

    make_stream(key, vec_all(counter_of(message->nonce, message->counter)), false, stream);
    if (whole > 0) {
        struct products products = no_products();
        mix(&products, key, BATCH - whole / BLOCK, load_block(message->sum), message->seal, stream, in, whole, out);
        store_block(message->sum, reduced_sum(&products));
    }
    store_block(message->stream, load_block(stream + whole));
    mix_bytes(message, 0, in + whole, nbytes - whole, out + whole);
    message->counter += (uint32_t)count_blocks(nbytes);
    wipe_batch(stream);
}

static void piece(gcm_message *message, const uint8_t *in, size_t nbytes, uint8_t *out) {
    const size_t have = (size_t)(message->nbytes % BLOCK), room = BLOCK - have;
    size_t done = 0;

    if (nbytes == 0) return;
    if (message->nbytes == 0) hash_block(message, (size_t)(message->aad_nbytes % BLOCK));
    message->nbytes += nbytes;
    if (have > 0) {
        done = nbytes < room ? nbytes : room;
        mix_bytes(message, have, in, done, out);
        if (done == room) hash_block(message, BLOCK);
    }
    done += crypt_batches(message, in + done, nbytes - done, out + done);
    if (done < nbytes) crypt_rest(message, in + done, nbytes - done, out + done);
}

static __m128i tag_of(const gcm_message *message) {
    const gcm_key *const key = message->key;
    const size_t pending = (size_t)((message->nbytes > 0 ? message->nbytes : message->aad_nbytes) % BLOCK);
    const __m128i mask = encrypted_block(key, _mm_shuffle_epi8(counter_of(message->nonce, 1), counter_order()));
    const __m128i sizes = turned_block(sizes_block(message->aad_nbytes, message->nbytes));
    uint8_t end[2 * BLOCK] = {0};
    __m128i sum = load_block(message->sum);

    memcpy(end, message->block, pending);
    store_block(end + BLOCK, sizes);
    sum = pending > 0 ? hashed(key, sum, end, sizeof(end)) : hashed(key, sum, end + BLOCK, BLOCK);
    wipe(end, sizeof(end));
    return _mm_xor_si128(turned_block(sum), mask);
}

static bool equal(__m128i a, __m128i b) { return _mm_movemask_epi8(_mm_cmpeq_epi8(a, b)) == 0xffff; }

static void wipe_message(gcm_message *message) { wipe((uint8_t *)message, sizeof(*message)); }

static void finish_seal(gcm_message *message, uint8_t *tag_ret) {
    store_block(tag_ret, tag_of(message));
    wipe_message(message);
}

static bool finish_open(gcm_message *message, const uint8_t *tag) {
    const bool good = equal(tag_of(message), load_block(tag));

    wipe_message(message);
    PUBLIC(good);
    return good;
}

/* ---------------------------------------------------------------- messages in one call */

/* Whether AAD, text and sizes have a power each, so that one reduction is enough. */
ALWAYS_INLINE bool is_short(size_t aad_nbytes, size_t nbytes) {
    return aad_nbytes < BATCH_NBYTES && nbytes < BATCH_NBYTES &&
           count_blocks(aad_nbytes) + count_blocks(nbytes) < BATCH;
}

ALWAYS_INLINE __m128i crypt_short(const gcm_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                                  const uint8_t *in, size_t nbytes, uint8_t *out, bool seal) {
    const size_t text = BATCH - 1 - count_blocks(nbytes), start = text - count_blocks(aad_nbytes);
    const __m128i none = _mm_setzero_si128();
    struct products products = no_products();
    uint8_t stream[BATCH_NBYTES];
    __m128i mask;

    make_stream(key, vec_all(counter_of(nonce, FIRST_COUNTER)), true, stream);
    multiply_bytes(&products, key, start, none, aad, aad_nbytes);
    mix(&products, key, text, none, seal, stream, in, nbytes, out);
    multiply(&products, key, BATCH - 1, vec_first(sizes_block(aad_nbytes, nbytes)));
    mask = load_block(stream + BATCH_NBYTES - BLOCK);
    wipe_batch(stream);
    return _mm_xor_si128(turned_block(reduced_sum(&products)), mask);
}

static void seal_message(const gcm_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                         const uint8_t *in, size_t nbytes, uint8_t *out, uint8_t *tag_ret) {
    gcm_message message;

    if (is_short(aad_nbytes, nbytes)) {
        store_block(tag_ret, crypt_short(key, nonce, aad, aad_nbytes, in, nbytes, out, true));
        return;
    }
    begin(&message, key, nonce, true);
    add_aad(&message, aad, aad_nbytes);
    piece(&message, in, nbytes, out);
    finish_seal(&message, tag_ret);
}

static bool open_message(const gcm_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                         const uint8_t *in, size_t nbytes, uint8_t *out, const uint8_t *tag) {
    const __m128i expected = load_block(tag); /* now: the tag may lie where out is written */
    gcm_message message;
    bool good;

    if (is_short(aad_nbytes, nbytes)) {
        good = equal(crypt_short(key, nonce, aad, aad_nbytes, in, nbytes, out, false), expected);
    } else {
        begin(&message, key, nonce, false);
        add_aad(&message, aad, aad_nbytes);
        piece(&message, in, nbytes, out);
        good = equal(tag_of(&message), expected);
        wipe_message(&message);
    }
    PUBLIC(good);
    if (!good && nbytes > 0) memset(out, 0, nbytes);
    return good;
}

KERNEL_LINKAGE const agsf_vaes KERNEL = {
    .name = KERNEL_NAME,
    .key_init = key_init,
    .seal = seal_message,
    .open = open_message,
    .begin = begin,
    .aad = add_aad,
    .piece = piece,
    .finish_seal = finish_seal,
    .finish_open = finish_open,
};
