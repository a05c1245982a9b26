/*
 * A static program that starts another program of the injected agent with the agent's own dynamic loader and C library.
 *
 * The kernel starts a dynamic program with the loader that the program names, such as /lib64/ld-linux-x86-64.so.2. In a
 * user's image, this file may be missing, of another C library (musl), or too old. This program needs neither a loader
 * nor a C library. It is copied to DIR/bin/NAME and runs DIR/programs/NAME with DIR/libc/ld.so, wherever DIR is. The
 * environment stays as it is, so that programs of the user's image, which the agent starts, find their own libraries.
 *
 *   DIR/bin/NAME ARGUMENT...               runs DIR/programs/NAME
 *   DIR/bin/agent [--prefer PROGRAM]       runs the agent, or PROGRAM in its place if that can be executed
 */
#define AT_FDCWD (-100) /* From the headers of Linux, which a build for no C library lacks. */
#define X_OK 1
#if defined(__x86_64__)
enum { SYS_write = 1, SYS_execve = 59, SYS_exit_group = 231, SYS_readlinkat = 267, SYS_faccessat = 269 };
#elif defined(__aarch64__)
enum { SYS_write = 64, SYS_execve = 221, SYS_exit_group = 94, SYS_readlinkat = 78, SYS_faccessat = 48 };
#else
#error "expected x86_64 or aarch64"
#endif

#define LONGEST 4096
#define ARGUMENTS 256
#define CANNOT_EXECUTE 126

static char texts[4 * LONGEST];
static unsigned used;

#if defined(__x86_64__)
static long call(long number, long a, long b, long c, long d) {
    register long r10 __asm__("r10") = d;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10)
                     : "rcx", "r11", "memory");
    return result;
}
__asm__(".globl _start\n_start:\n xor %ebp, %ebp\n mov %rsp, %rdi\n and $-16, %rsp\n call start\n");
#elif defined(__aarch64__)
static long call(long number, long a, long b, long c, long d) {
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c,
                  x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
}
__asm__(".globl _start\n_start:\n mov x29, #0\n mov x0, sp\n bl start\n");
#endif

static unsigned long length_of(const char *text) {
    unsigned long n = 0;
    while (text[n] != '\0') n++;
    return n;
}

static int equal(const char *a, const char *b) {
    while (*a != '\0' && *a == *b) a++, b++;
    return *a == *b;
}

static void print(const char *text) { call(SYS_write, 2, (long)text, (long)length_of(text), 0); }

__attribute__((noreturn)) static void fail(const char *path, const char *message) {
    print(path);
    print(message);
    for (;;) call(SYS_exit_group, CANNOT_EXECUTE, 0, 0, 0);
}

/* Return the concatenation of two texts, in static memory. */
static char *joined(const char *first, const char *second) {
    if (used + length_of(first) + length_of(second) + 1 > sizeof texts) fail(first, ": too long a path\n");
    char *made = texts + used, *at = made;
    while (*first != '\0') *at++ = *first++;
    while (*second != '\0') *at++ = *second++;
    *at++ = '\0';
    used = (unsigned)(at - texts);
    return made;
}

static long execute(char *path, char **arguments, char **environment) {
    return call(SYS_execve, (long)path, (long)arguments, (long)environment, 0);
}

/* Cut a path at its last slash and return the part behind it. */
static char *cut(char *path) {
    char *slash = path;
    for (char *at = path; *at != '\0'; at++)
        if (*at == '/') slash = at;
    *slash = '\0';
    return slash + 1;
}

/* ``stack``: the number of arguments, the arguments, NULL, the environment, NULL, as the kernel passes them. */
__attribute__((noreturn, used)) void start(long *stack) {
    static char dir[LONGEST];
    static char *command[ARGUMENTS];
    long argc = stack[0];
    char **argv = (char **)(stack + 1), **environment = argv + argc + 1;
    if (call(SYS_readlinkat, AT_FDCWD, (long)"/proc/self/exe", (long)dir, sizeof dir - 1) <= 0)
        fail("/proc/self/exe", ": found no link; expected one to the injected agent. Mount /proc in the container\n");
    char *name = cut(dir);
    cut(dir);

    long given = 1;
    int agent = equal(name, "agent");
    if (agent && argc == 3 && equal(argv[1], "--prefer")) {
        if (call(SYS_faccessat, AT_FDCWD, (long)argv[2], X_OK, 0) == 0) execute(argv[2], argv + 2, environment);
        given = 3;
    }
    if (argc > ARGUMENTS - 16) fail(name, ": too many arguments\n");
    const char *program = agent ? "python" : name;
    int n = 0;
    command[n++] = joined(dir, "/libc/ld.so");
    command[n++] = "--inhibit-cache"; /* The cache of the image names the image's C library. */
    command[n++] = "--library-path";
    command[n++] = joined(dir, "/libc");
    command[n++] = "--argv0";
    command[n++] = joined(joined(dir, "/bin/"), program);
    command[n++] = joined(joined(dir, "/programs/"), program);
    if (agent) {
        command[n++] = "-I"; /* PYTHONPATH and PYTHONHOME are for the image's Python. */
        command[n++] = "-m";
        command[n++] = "dltrain.agent.main";
    }
    while (given < argc) command[n++] = argv[given++];
    execute(command[0], command, environment);
    fail(command[0], ": cannot be executed; expected the loader of the injected agent\n");
}
