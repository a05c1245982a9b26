/*
 * A library that is preloaded into mpirun and the MPI daemons. Each of their TCP sockets gets a loopback address, so
 * that only processes of the same pod can connect to it.
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

static int bind_to(int fd, const void *address, socklen_t length) {
    return (int)syscall(SYS_bind, fd, address, length);
}

int bind(int fd, const struct sockaddr *given, socklen_t length) {
    if (given->sa_family == AF_INET && length >= sizeof(struct sockaddr_in)) {
        struct sockaddr_in local;
        memcpy(&local, given, sizeof local);
        local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        return bind_to(fd, &local, sizeof local);
    }
    if (given->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6)) {
        struct sockaddr_in6 local;
        memcpy(&local, given, sizeof local);
        local.sin6_addr = in6addr_loopback;
        return bind_to(fd, &local, sizeof local);
    }
    return bind_to(fd, given, length);
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
