/*
 * Blocks for torch's tensors in which later tensors of the same size fit, after the first ones are freed.
 *
 * torch allocates a tensor with posix_memalign, aligned to 64 bytes. glibc then looks for a free block that is 96 bytes
 * larger than the tensor, because it does not know how a free block is aligned, and returns the rest. So when a tensor
 * between two others is freed, its block is too small for the next tensor of the same size, and the heap grows.
 *
 * allocate_reusable instead asks malloc for a multiple of 64 bytes, with the 8 bytes that malloc needs itself. The
 * block of a freed tensor of the same size then fits exactly, and is aligned. Only a block that is not aligned goes
 * back, and posix_memalign allocates another. All blocks come from malloc and posix_memalign, so free, realloc and
 * malloc_usable_size work as before.
 */
#define _GNU_SOURCE
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#define CALL R_X86_64_JUMP_SLOT
#define ADDRESS R_X86_64_GLOB_DAT
#elif defined(__aarch64__)
#define CALL R_AARCH64_JUMP_SLOT
#define ADDRESS R_AARCH64_GLOB_DAT
#endif

enum {
    ALIGNMENT = 64, /* That of torch's tensors. */
    OVERHEAD = 8,   /* Bytes of a block that glibc needs itself. */
    SMALLEST = 1024, /* glibc keeps smaller free blocks in lists by size, where they fit in any case. */
    LARGEST = (32 << 20) - 2 * 4096 /* glibc maps larger blocks apart from the heap (see heap.py). */
};

/* Allocate n bytes, as posix_memalign does. */
int allocate_reusable(void **block, size_t alignment, size_t n) {
    if (alignment != ALIGNMENT || n < SMALLEST || n > LARGEST)
        return posix_memalign(block, alignment, n);
    size_t whole = ((n + OVERHEAD + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1)) - OVERHEAD;
    void *found = malloc(whole);
    if (found != NULL && (uintptr_t)found % ALIGNMENT == 0) {
        *block = found;
        return 0;
    }
    free(found);
    return posix_memalign(block, ALIGNMENT, whole);
}

/* What the dynamic linker has loaded of a shared library. */
struct loaded {
    const char *name;    /* File name of the library, without its folder. */
    int replaced;        /* Number of references to posix_memalign that were replaced. */
};

/* Return the address that a dynamic entry has. musl and some processors leave it relative to the library's base. */
static const void *address_of(const struct dl_phdr_info *library, const ElfW(Dyn) *entry) {
    ElfW(Addr) at = entry->d_un.d_ptr;
    return (const void *)(at < library->dlpi_addr ? at + library->dlpi_addr : at);
}

/* Write a reference. The dynamic linker may have made its page read-only after it resolved all references. */
static int write_reference(const struct dl_phdr_info *library, void **reference) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)reference;
    void *start = (void *)(at & ~(page - 1));
    int is_read_only = 0;
    for (int i = 0; i < library->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &library->dlpi_phdr[i];
        uintptr_t low = library->dlpi_addr + part->p_vaddr, high = low + part->p_memsz;
        if (part->p_type == PT_GNU_RELRO && at >= (low & ~(page - 1)) && at < (high & ~(page - 1)))
            is_read_only = 1;
    }
    if (is_read_only && mprotect(start, page, PROT_READ | PROT_WRITE) != 0)
        return 0;
    __atomic_store_n(reference, (void *)allocate_reusable, __ATOMIC_RELEASE);
    if (is_read_only)
        mprotect(start, page, PROT_READ);
    return 1;
}

static void replace_in(const struct dl_phdr_info *library, const ElfW(Rela) *list, size_t nbytes,
                       const ElfW(Sym) *symbols, const char *names, struct loaded *wanted) {
    for (size_t i = 0; list != NULL && i < nbytes / sizeof *list; i++) {
        unsigned long kind = ELF64_R_TYPE(list[i].r_info);
        const ElfW(Sym) *symbol = &symbols[ELF64_R_SYM(list[i].r_info)];
        if ((kind == CALL || kind == ADDRESS) && strcmp(names + symbol->st_name, "posix_memalign") == 0)
            wanted->replaced += write_reference(library, (void **)(library->dlpi_addr + list[i].r_offset));
    }
}

static int look_at(struct dl_phdr_info *library, size_t size, void *given) {
    (void)size;
    struct loaded *wanted = given;
    const char *name = strrchr(library->dlpi_name, '/');
    if (strcmp(name == NULL ? library->dlpi_name : name + 1, wanted->name) != 0)
        return 0;
    const ElfW(Sym) *symbols = NULL;
    const ElfW(Rela) *calls = NULL, *others = NULL;
    const char *names = NULL;
    size_t calls_nbytes = 0, others_nbytes = 0;
    for (int i = 0; i < library->dlpi_phnum; i++) {
        if (library->dlpi_phdr[i].p_type != PT_DYNAMIC)
            continue;
        const ElfW(Dyn) *entry = (const void *)(library->dlpi_addr + library->dlpi_phdr[i].p_vaddr);
        for (; entry->d_tag != DT_NULL; entry++) {
            switch (entry->d_tag) {
            case DT_SYMTAB: symbols = address_of(library, entry); break;
            case DT_STRTAB: names = address_of(library, entry); break;
            case DT_JMPREL: calls = address_of(library, entry); break;
            case DT_PLTRELSZ: calls_nbytes = entry->d_un.d_val; break;
            case DT_RELA: others = address_of(library, entry); break;
            case DT_RELASZ: others_nbytes = entry->d_un.d_val; break;
            }
        }
    }
    if (symbols == NULL || names == NULL)
        return 0;
    replace_in(library, calls, calls_nbytes, symbols, names, wanted);
    replace_in(library, others, others_nbytes, symbols, names, wanted);
    return 0;
}

/*
 * Make the loaded shared library with this file name call allocate_reusable instead of posix_memalign, from now on.
 * Other code of the process is not changed. Return the number of references that were replaced: 0 if the library is not
 * loaded, or does not use posix_memalign.
 */
int replace_memalign(const char *name) {
    struct loaded wanted = {name, 0};
    dl_iterate_phdr(look_at, &wanted);
    return wanted.replaced;
}
