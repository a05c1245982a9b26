/*
 * A library that is preloaded into mpirun and the MPI daemons. Each of their sockets listens on a loopback address, so
 * that only processes of the same pod can connect to it, and connects to a loopback address, where the agent forwards
 * the connection. The address that was given remains visible to PRRTE, which accepts no loopback address as a peer's.
 *
 * The reason: the launcher of Open MPI (PRRTE) listens on all addresses and has no authentication. Whoever can connect
 * to one of its ports can start processes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Call bind or connect with a loopback address of the same family and port. */
static int with_loopback(long call, int fd, const struct sockaddr *given, socklen_t length) {
    if (given->sa_family == AF_INET && length >= sizeof(struct sockaddr_in)) {
        struct sockaddr_in local;
        memcpy(&local, given, sizeof local);
        local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        return (int)syscall(call, fd, &local, sizeof local);
    }
    if (given->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6)) {
        struct sockaddr_in6 local;
        memcpy(&local, given, sizeof local);
        local.sin6_addr = in6addr_loopback;
        return (int)syscall(call, fd, &local, sizeof local);
    }
    return (int)syscall(call, fd, given, length);
}

int bind(int fd, const struct sockaddr *address, socklen_t length) {
    return with_loopback(SYS_bind, fd, address, length);
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    return with_loopback(SYS_connect, fd, address, length);
}

/* The kernel would bind a socket without an address to all addresses. */
int listen(int fd, int backlog) {
    struct sockaddr_storage local;
    socklen_t length = sizeof local;
    if (getsockname(fd, (struct sockaddr *)&local, &length) != 0)
        return -1;
    const struct sockaddr_in *four = (const struct sockaddr_in *)&local;
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)&local;
    if ((local.ss_family == AF_INET && four->sin_addr.s_addr != htonl(INADDR_LOOPBACK)) ||
        (local.ss_family == AF_INET6 && memcmp(&six->sin6_addr, &in6addr_loopback, sizeof in6addr_loopback) != 0)) {
        errno = EACCES;
        return -1;
    }
    return (int)syscall(SYS_listen, fd, backlog);
}
