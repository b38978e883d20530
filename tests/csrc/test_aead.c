/*
 * test_aead.c - single messages and the limits of keys.
 *
 * Guards: what is sealed is AES-GCM (test cases of its authors' submission to NIST); a failed open leaves zeros and
 * only zeros; one context seals and opens in turn; an AAD and a message are the same however they are cut; the counter
 * belongs to the key's value, outlives every agsf_key, and stops the message after the 2^32nd, also between racing
 * threads.
 */
#include "support.h"

#include <pthread.h>

#include "aead.h"

/* McGrew and Viega, "The Galois/Counter Mode of Operation (GCM)", appendix B: cases with a 96-bit nonce. */
#define KEY "feffe9928665731c6d6a8f9467308308"
#define NONCE "cafebabefacedbaddecaf888"
#define AAD "feedfacedeadbeeffeedfacedeadbeefabaddad2"
#define ZEROS "00000000000000000000000000000000"
#define PLAIN60 \
    "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72" \
    "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
static const struct vector {
    const char *key, *nonce, *aad, *plain, *sealed;
} vectors[] = {
    {ZEROS, "000000000000000000000000", "", "", "58e2fccefa7e3061367f1d57a4e7455a"},
    {ZEROS, "000000000000000000000000", "", ZEROS, "0388dace60b6a392f328c2b971b2fe78ab6e47d42cec13bdf53a67b21257bddf"},
    {KEY, NONCE, "", PLAIN60 "1aafd255",
     "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e"
     "21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091473f59854d5c2af327cd64a62cf35abd2ba6fab4"},
    {KEY, NONCE, AAD, PLAIN60,
     "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e"
     "21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e0915bc94fbc3221a5db94fae95ae7121a47"},
    {ZEROS "0000000000000000", "000000000000000000000000", "", "", "cd33b28ac773f74ba00ed1f312572435"},
    {KEY "feffe9928665731c", NONCE, AAD, PLAIN60,
     "3980ca0b3c00e841eb06fac4872a2757859e1ceaa6efd984628593b40ca1e19c"
     "7d773d00c144c525ac619d18c84a3f4718e2448b2fe324d9ccda27102519498e80f1478f37ba55bd6d27618c"},
    {ZEROS ZEROS, "000000000000000000000000", "", ZEROS,
     "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"},
    {KEY KEY, NONCE, AAD, PLAIN60,
     "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
     "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f66276fc6ece0f4e1768cddf8853bb2d551b"},
};

static guarded unhex(const char *hex, enum side side) {
    guarded buffer = guarded_new(strlen(hex) / 2, side);

    from_hex(buffer.data, hex);
    return buffer;
}

/* Opens with one bit changed at a time, of one of the inputs: zeros, and nothing else, must come out. */
static void check_flips(agsf_key *key, guarded *flipped, const guarded *nonce, const guarded *aad,
                        const guarded *sealed, enum side side) {
    for (size_t bit = 0; bit < flipped->nbytes * 8; bit++) {
        guarded out = guarded_new(sealed->nbytes - AGSF_TAG_NBYTES, side);
        flipped->data[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK_EQUAL(agsf_open(key, nonce->data, aad->data, aad->nbytes, sealed->data, out.nbytes, out.data),
                    AGSF_BAD_TAG);
        flipped->data[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(all_are(out.data, out.nbytes, 0));
        guarded_free(&out);
    }
}

static void check_vector(const struct vector *vector, enum side side) {
    guarded bytes = unhex(vector->key, side), nonce = unhex(vector->nonce, side), aad = unhex(vector->aad, side);
    guarded plain = unhex(vector->plain, side), sealed = unhex(vector->sealed, side);
    guarded sealed_now = guarded_new(sealed.nbytes, side), opened = guarded_new(plain.nbytes, side);
    agsf_key *key;

    CHECK_EQUAL(agsf_key_new(bytes.data, bytes.nbytes, &key), AGSF_OK);
    for (unsigned turn = 0; turn < 3; turn++) { /* one context all the time: sealing, opening and failing in turn */
        CHECK_EQUAL(agsf_seal(key, nonce.data, aad.data, aad.nbytes, plain.data, plain.nbytes, sealed_now.data),
                    AGSF_OK);
        CHECK(memcmp(sealed_now.data, sealed.data, sealed.nbytes) == 0);
        CHECK_EQUAL(agsf_open(key, nonce.data, aad.data, aad.nbytes, sealed.data, plain.nbytes, opened.data), AGSF_OK);
        CHECK(memcmp(opened.data, plain.data, plain.nbytes) == 0);
        check_flips(key, &sealed, &nonce, &aad, &sealed, side);
        check_flips(key, &nonce, &nonce, &aad, &sealed, side);
        check_flips(key, &aad, &nonce, &aad, &sealed, side);
    }
    if (plain.nbytes == 0) { /* where there is nothing to point at, NULL will do */
        CHECK_EQUAL(agsf_seal(key, nonce.data, NULL, 0, NULL, 0, sealed_now.data), AGSF_OK);
        CHECK(memcmp(sealed_now.data, sealed.data, sealed.nbytes) == 0);
        CHECK_EQUAL(agsf_open(key, nonce.data, NULL, 0, sealed.data, 0, NULL), AGSF_OK);
    }
    agsf_key_free(key);
    guarded_free(&bytes);
    guarded_free(&nonce);
    guarded_free(&aad);
    guarded_free(&plain);
    guarded_free(&sealed);
    guarded_free(&sealed_now);
    guarded_free(&opened);
}

/* An AAD in one part or in two, joined in a buffer or not, makes the same tag. */
static void check_aad_parts(agsf_key *key) {
    static const size_t prefixes[] = {0,   1,   12,  15,   16,   17,   123,  124,  125,
                                      127, 128, 129, 1019, 1020, 1021, 1024, 1025, 5000};
    const uint8_t nonce[AGSF_NONCE_NBYTES] = {9}, plain[33] = {7};

    for (size_t i = 0; i < COUNT(prefixes) * 2; i++) {
        const size_t prefix_nbytes = prefixes[i / 2], nbytes = prefix_nbytes + 4;
        guarded aad = guarded_new(nbytes, i % 2 ? AT_START : AT_END);
        guarded prefix = guarded_new(prefix_nbytes, i % 2 ? AT_START : AT_END);
        uint8_t whole[sizeof(plain) + AGSF_TAG_NBYTES], parts[sizeof(whole)], opened[sizeof(plain)];
        const agsf_message message = {.nonce = nonce,
                                      .prefix = prefix.data,
                                      .suffix = aad.data + prefix_nbytes,
                                      .prefix_nbytes = prefix_nbytes,
                                      .suffix_nbytes = 4,
                                      .cached = i % 2 == 0};
        agsf_lane *lane;

        checking("an AAD prefix of %zu bytes", prefix_nbytes);
        fill(aad.data, nbytes, prefix_nbytes);
        if (prefix_nbytes > 0) memcpy(prefix.data, aad.data, prefix_nbytes);
        CHECK_EQUAL(agsf_seal(key, nonce, aad.data, nbytes, plain, sizeof(plain), whole), AGSF_OK);
        CHECK_EQUAL(agsf_key_reserve(key, 1), AGSF_OK);
        CHECK_EQUAL(agsf_lane_borrow(key, 0, &lane), AGSF_OK);
        CHECK_EQUAL(agsf_lane_begin_seal(lane, &message), AGSF_OK);
        CHECK_EQUAL(agsf_lane_update(lane, plain, 16, parts), AGSF_OK);
        CHECK_EQUAL(agsf_lane_update(lane, plain + 16, sizeof(plain) - 16, parts + 16), AGSF_OK);
        CHECK_EQUAL(agsf_lane_finish_seal(lane, parts + sizeof(plain)), AGSF_OK);
        CHECK(memcmp(whole, parts, sizeof(whole)) == 0);
        CHECK_EQUAL(agsf_lane_begin_open(lane, &message), AGSF_OK);
        CHECK_EQUAL(agsf_lane_update(lane, whole, sizeof(plain), opened), AGSF_OK);
        CHECK_EQUAL(agsf_lane_finish_open(lane, whole + sizeof(plain)), AGSF_OK);
        CHECK_EQUAL(agsf_lane_seal(lane, &message, plain, sizeof(plain), parts), AGSF_OK);
        CHECK(memcmp(whole, parts, sizeof(whole)) == 0);
        memset(opened, SLACK, sizeof(opened));
        CHECK_EQUAL(agsf_lane_open(lane, &message, whole, sizeof(plain), opened), AGSF_OK);
        CHECK(memcmp(plain, opened, sizeof(plain)) == 0);
        parts[sizeof(plain)] ^= 1;
        CHECK_EQUAL(agsf_lane_open(lane, &message, parts, sizeof(plain), opened), AGSF_BAD_TAG);
        agsf_lane_return(key, lane);
        guarded_free(&aad);
        guarded_free(&prefix);
    }
}

/* A message in one part or in many, of whatever sizes, makes the same bytes. */
static void check_message_parts(agsf_key *key) {
    static const size_t sizes[] = {1, 17, 2047, 2048, 2049, 4096, 5000, 65536, 262143, 262144, 262145, 1 << 20};
    static const size_t parts[] = {1000, 1024, 4093, 100000};
    const uint8_t nonce[AGSF_NONCE_NBYTES] = {8};
    const agsf_message message = {.nonce = nonce};

    for (size_t i = 0; i < COUNT(sizes) * COUNT(parts); i++) {
        const size_t nbytes = sizes[i / COUNT(parts)], part = parts[i % COUNT(parts)];
        guarded plain = guarded_new(nbytes, AT_END), whole = guarded_new(nbytes + AGSF_TAG_NBYTES, AT_END);
        guarded cut = guarded_new(whole.nbytes, AT_END), opened = guarded_new(nbytes, AT_END);
        agsf_lane *lane;

        checking("a message of %zu bytes in parts of %zu", nbytes, part);
        fill(plain.data, nbytes, i);
        CHECK_EQUAL(agsf_seal(key, nonce, NULL, 0, plain.data, nbytes, whole.data), AGSF_OK);
        CHECK_EQUAL(agsf_key_reserve(key, 1), AGSF_OK);
        CHECK_EQUAL(agsf_lane_borrow(key, 0, &lane), AGSF_OK);
        CHECK_EQUAL(agsf_lane_begin_seal(lane, &message), AGSF_OK);
        for (size_t at = 0; at < nbytes; at += part) {
            const size_t here = nbytes - at < part ? nbytes - at : part;
            CHECK_EQUAL(agsf_lane_update(lane, plain.data + at, here, cut.data + at), AGSF_OK);
        }
        CHECK_EQUAL(agsf_lane_finish_seal(lane, cut.data + nbytes), AGSF_OK);
        agsf_lane_return(key, lane);
        CHECK(memcmp(whole.data, cut.data, whole.nbytes) == 0);
        CHECK_EQUAL(agsf_open(key, nonce, NULL, 0, cut.data, nbytes, opened.data), AGSF_OK);
        CHECK(memcmp(plain.data, opened.data, nbytes) == 0);
        guarded_free(&plain);
        guarded_free(&whole);
        guarded_free(&cut);
        guarded_free(&opened);
    }
}

static agsf_status seal_one(agsf_key *key) {
    const uint8_t nonce[AGSF_NONCE_NBYTES] = {1};
    uint8_t out[AGSF_TAG_NBYTES];
    agsf_status status;

    memset(out, SLACK, sizeof(out));
    status = agsf_seal(key, nonce, NULL, 0, NULL, 0, out);
    CHECK(status == AGSF_OK || all_are(out, sizeof(out), SLACK)); /* "nothing was done" */
    return status;
}

static void check_counters(void) {
    agsf_key *a = key_of(16, 1), *same = key_of(16, 1), *longer = key_of(32, 1);
    uint8_t nothing[1] = {0};
    agsf_key *none = NULL;

    for (size_t nbytes = 0; nbytes <= 64; nbytes++) {
        guarded bytes;
        if (nbytes == 16 || nbytes == 24 || nbytes == 32) continue;
        bytes = guarded_new(nbytes, AT_END);
        CHECK_EQUAL(agsf_key_new(bytes.data, nbytes, &none), AGSF_BAD_ARGUMENT);
        CHECK(none == NULL);
        guarded_free(&bytes);
    }
    CHECK_EQUAL(agsf_key_new(nothing, SIZE_MAX, &none), AGSF_BAD_ARGUMENT);
    agsf_key_free(NULL);

    CHECK_EQUAL(agsf_key_sealed(a), 0);
    CHECK_EQUAL(seal_one(a), AGSF_OK);
    CHECK_EQUAL(seal_one(same), AGSF_OK);
    CHECK_EQUAL(agsf_key_sealed(a), 2);
    CHECK_EQUAL(agsf_key_sealed(longer), 0); /* 32 bytes that begin with the 16 are another value */
    agsf_key_free(a);
    agsf_key_free(same);
    a = key_of(16, 1);
    CHECK_EQUAL(agsf_key_sealed(a), 2); /* the count outlives the objects */

    CHECK_EQUAL(agsf_key_carry(a, AGSF_KEY_LIMIT + 1), AGSF_LIMIT);
    CHECK_EQUAL(agsf_key_carry(a, UINT64_MAX), AGSF_LIMIT);
    CHECK_EQUAL(agsf_key_carry(a, AGSF_KEY_LIMIT - 4), AGSF_OK);
    CHECK_EQUAL(agsf_key_carry(a, 7), AGSF_OK); /* the largest counts */
    CHECK_EQUAL(seal_one(a), AGSF_OK);
    same = key_of(16, 1);
    CHECK_EQUAL(seal_one(same), AGSF_OK); /* the 2^32nd */
    CHECK_EQUAL(seal_one(same), AGSF_LIMIT);
    CHECK_EQUAL(seal_one(a), AGSF_LIMIT);
    CHECK_EQUAL(agsf_key_sealed(a), 4);
    CHECK_EQUAL(agsf_key_carry(longer, AGSF_KEY_LIMIT), AGSF_OK);
    CHECK_EQUAL(seal_one(longer), AGSF_LIMIT);
    agsf_key_free(a);
    agsf_key_free(same);
    agsf_key_free(longer);

    /* More values than the table of counters has room for at first: it grows, and forgets none. */
    for (unsigned round = 1; round <= 2; round++) {
        for (unsigned i = 0; i < 300; i++) {
            agsf_key *key = key_of(i % 2 ? 24 : 32, 1000 + i);
            for (unsigned n = 0; n < i % 5; n++) CHECK_EQUAL(seal_one(key), AGSF_OK);
            CHECK_EQUAL(agsf_key_sealed(key), round * (i % 5));
            agsf_key_free(key);
        }
    }
}

/* HKDF-Extract is HMAC: what Python's hmac gives for these. A salt longer than a block of SHA-256 is hashed first. */
static void check_extract(void) {
    static const struct {
        const char *key, *salt, *out;
    } cases[] = {
        {"000102030405060708090a0b0c0d0e0f", "6ab959eb4cd64743be53d430a1e0d3a3",
         "0b14889522327600b044f2ff332f880be3a105b15411d043b28d75ff654de4c6"},
        {KEY KEY, "", "f5351b7c6059301a8d7ad1a8633d0eec2605eb8373e4dcaffe20e52220e9b979"},
        {KEY "feffe9928665731c", KEY KEY KEY KEY AAD,
         "6fb9cfea116d1143036d25c19292a57a21e4feeb4e55019bcbd6d12d08affd75"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        guarded bytes = unhex(cases[i].key, AT_END), salt = unhex(cases[i].salt, AT_END),
                expected = unhex(cases[i].out, AT_END), out = guarded_new(AGSF_EXTRACT_NBYTES, AT_END);
        agsf_key *key = NULL;
        CHECK_EQUAL(agsf_key_new(bytes.data, bytes.nbytes, &key), AGSF_OK);
        CHECK_EQUAL(agsf_key_extract(key, salt.data, salt.nbytes, out.data), AGSF_OK);
        CHECK(memcmp(out.data, expected.data, AGSF_EXTRACT_NBYTES) == 0);
        CHECK_EQUAL(agsf_key_extract(key, salt.data, SIZE_MAX, out.data), AGSF_BAD_ARGUMENT);
        agsf_key_free(key);
        guarded_free(&bytes);
        guarded_free(&salt);
        guarded_free(&expected);
        guarded_free(&out);
    }
}

enum { RACERS = 4, LEFT = 1001 };

static void *race(void *sealed_ret) {
    agsf_key *key = key_of(16, 77); /* each thread its own object of the same value */

    for (unsigned i = 0; i < LEFT; i++) {
        const agsf_status status = seal_one(key);
        CHECK(status == AGSF_OK || status == AGSF_LIMIT);
        *(unsigned *)sealed_ret += status == AGSF_OK;
    }
    agsf_key_free(key);
    return NULL;
}

static void check_race_to_the_limit(void) {
    agsf_key *key = key_of(16, 77);
    unsigned sealed[RACERS] = {0}, sum = 0;
    pthread_t threads[RACERS];

    CHECK_EQUAL(agsf_key_carry(key, AGSF_KEY_LIMIT - LEFT), AGSF_OK);
    for (unsigned i = 0; i < RACERS; i++) CHECK(pthread_create(&threads[i], NULL, race, &sealed[i]) == 0);
    for (unsigned i = 0; i < RACERS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        sum += sealed[i];
    }
    CHECK_EQUAL(sum, LEFT);
    CHECK_EQUAL(agsf_key_sealed(key), LEFT);
    agsf_key_free(key);
}

int main(void) {
    agsf_key *key;

    start();
    for (size_t i = 0; i < COUNT(vectors) * 2; i++) {
        checking("vector %zu", i / 2);
        check_vector(&vectors[i / 2], i % 2 ? AT_START : AT_END);
    }
    key = key_of(32, 5);
    check_aad_parts(key);
    check_message_parts(key);
    agsf_key_free(key);
    checking("counters");
    check_counters();
    check_extract();
    check_race_to_the_limit();
    return 0;
}
