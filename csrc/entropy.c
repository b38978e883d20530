/*
 * entropy.c - random bytes of the operating system.
 *
 * Since Linux 6.11 the kernel's generator runs in the process, too: the vDSO, a library that the kernel maps, has
 * __vdso_getrandom(). It takes a tenth of a system call's time, and keeps the kernel's promises: the kernel wipes its
 * states in a child, and the code in the vDSO draws a new state whenever the kernel's own generator was seeded again,
 * as it is when a virtual machine is resumed. glibc 2.41 and newer call it; most systems have an older one.
 */
#define _DEFAULT_SOURCE /* getentropy(), MAP_ANONYMOUS */
#include "entropy.h"

#include <unistd.h>
#ifdef __APPLE__
#include <sys/random.h>
#endif

#ifdef __linux__
#include <link.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>

typedef ssize_t getrandom_function(void *out, size_t nbytes, unsigned flags, void *state, size_t state_nbytes);

enum { STATES_MAX = 32 };

/* What __vdso_getrandom() wants of its caller: struct vgetrandom_opaque_params of linux/random.h. */
struct wishes {
    uint32_t state_nbytes, mmap_prot, mmap_flags, reserved[13];
};

static getrandom_function *fast; /* NULL: there is none */
static size_t state_nbytes;
/*
 * A state serves one thread at a time. Each place holds a state or NULL and is taken and filled by one atomic step.
 * What other threads have taken in the moment of a fork is missing in the child, which has the system call besides.
 */
static _Atomic(void *) states[STATES_MAX];

/* The function in the vDSO, by its table of symbols. Its image begins at its first segment. */
static getrandom_function *find(const uint8_t *image) {
    const ElfW(Ehdr) *const header = (const void *)image;
    const ElfW(Phdr) *const segments = (const void *)(image + header->e_phoff);
    const ElfW(Dyn) *entry = NULL;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const ElfW(Word) *hash = NULL;
    const uint8_t *base = image; /* what addresses in it count from */

    for (size_t i = header->e_phnum; i-- > 0;) {
        if (segments[i].p_type == PT_LOAD) base = image + segments[i].p_offset - segments[i].p_vaddr;
        if (segments[i].p_type == PT_DYNAMIC) entry = (const void *)(image + segments[i].p_offset);
    }
    for (; entry != NULL && entry->d_tag != DT_NULL; entry++) {
        const void *const at = base + entry->d_un.d_ptr;
        if (entry->d_tag == DT_SYMTAB) symbols = at;
        if (entry->d_tag == DT_STRTAB) names = at;
        if (entry->d_tag == DT_HASH) hash = at;
    }
    if (symbols == NULL || names == NULL || hash == NULL) return NULL;
    for (size_t i = 0; i < hash[1]; i++) { /* which is how many symbols there are */
        const uint8_t *const at = base + symbols[i].st_value;
        getrandom_function *function;
        if (symbols[i].st_shndx == SHN_UNDEF || strcmp(names + symbols[i].st_name, "__vdso_getrandom") != 0) continue;
        memcpy(&function, &at, sizeof(function)); /* C has no cast for that */
        return function;
    }
    return NULL;
}

void agsf_entropy_init(void) {
    const uint8_t *const image = (const uint8_t *)getauxval(AT_SYSINFO_EHDR); /* NOLINT(performance-no-int-to-ptr) */
    getrandom_function *const found = image == NULL ? NULL : find(image);
    const size_t page_nbytes = (size_t)sysconf(_SC_PAGESIZE);
    struct wishes wishes;
    uint8_t *page;

    if (fast != NULL || found == NULL || found(NULL, 0, 0, &wishes, SIZE_MAX) != 0) return;
    if (wishes.state_nbytes == 0 || wishes.state_nbytes > page_nbytes) return;
    page = mmap(NULL, page_nbytes, (int)wishes.mmap_prot, (int)wishes.mmap_flags, -1, 0);
    if (page == MAP_FAILED) return;
    state_nbytes = wishes.state_nbytes;
    for (size_t i = 0; i < STATES_MAX && (i + 1) * state_nbytes <= page_nbytes; i++)
        states[i] = page + i * state_nbytes;
    fast = found;
}

static bool draw_fast(uint8_t *out, size_t nbytes) {
    for (size_t i = 0; i < STATES_MAX; i++) {
        void *state = NULL;
        bool drawn;
        if (atomic_load_explicit(&states[i], memory_order_relaxed) != NULL) state = atomic_exchange(&states[i], NULL);
        if (state == NULL) continue;
        drawn = fast(out, nbytes, 0, state, state_nbytes) == (ssize_t)nbytes;
        atomic_store(&states[i], state);
        return drawn;
    }
    return false;
}
#else
void agsf_entropy_init(void) {}
#endif

bool agsf_entropy(uint8_t *out, size_t nbytes) {
#ifdef __linux__
    if (fast != NULL && draw_fast(out, nbytes)) return true;
#endif
    return getentropy(out, nbytes) == 0;
}
