// The engine's threads. OpenMP's threads wait for each other at the end of every loop: on cores that other programs use
// too, a thread that has lost its core stops all others for whole scheduler quanta. Here no thread waits for a helper
// that has not begun. Each worker takes the items of its own share of a job, a few at a time, then those that the
// others have not reached, and the caller continues when the last item is done. So on busy cores the caller does most
// items itself, and on free cores each worker reads its share of the memory from one end to the other.
//
// A helper spins for the next job for some microseconds, since jobs follow each other closely within a step, and sleeps
// between steps. There is one job at a time: a second caller does its own job alone.
//
// Memory order. The job's fields and the tickets are a seqlock, with the tickets as its sequence numbers:
// * The caller writes the fields (relaxed) and then opens the tickets (a release store). A helper loads a ticket with
//   acquire, so a helper that sees a ticket of job J sees fields of J or later, and the caller's data behind `job`.
// * A helper must not mix the fields of J with those of a later job. The caller shuts all tickets, then a release
//   fence, then the next fields; the helper loads the fields, then an acquire fence, then the compare-and-swap of its
//   ticket. If any field came from a later job, the fences pair, the swap sees the shut or a later ticket, and fails.
//   A job's number comes back after 2^32 jobs, far later than a helper between two of its instructions.
// * A helper adds to `done` with release after its items; the caller's acquire load of n reads the last of these
//   additions, which continue each other's release sequences, so it sees the results of all workers. No addition of an
//   old job can come later: the caller left that job when `done` was complete.
// * Sleeping is a store and a load on each side: a helper counts itself in `asleep` and then looks for open tickets,
//   the caller opens tickets and then looks at `asleep`. All four are sequentially consistent, the default of
//   stdatomic.h, so at least one of the two sees the other; release and acquire would let both miss.
#ifdef _OPENMP
#include <omp.h>
#endif
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "kernels.h"
#include "team.h"

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

enum { MOST = 256, PATIENCE = 64 };  // helpers; looks between two looks at the clock

// A worker's ticket is (job number << 32 | next item of its share); SHUT instead of an item means that the fields are
// being written.
#define SHUT 0xffffffffu

typedef struct {
  _Alignas(64) _Atomic uint64_t ticket;
} Share;

static struct {
  Share shares[MOST + 1];
  _Alignas(64) _Atomic int64_t done;
  _Alignas(64) _Atomic(job_fn) work;
  _Atomic(void *) job;
  _Atomic int64_t n, grain;
  _Atomic int size;  // shares
  _Alignas(64) _Atomic int asleep;
} team;

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER, sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wakeup = PTHREAD_COND_INITIALIZER;
static int helpers;
static uint64_t jobs;
static _Atomic int64_t spin_ns;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Takes a few items of a share and does them; returns 0 when there are none. The fields are read between the load of
// the ticket and its swap, and written only while it is shut, so the items belong to the job whose fields were read.
static int take_from(int share, int worker) {
  _Atomic uint64_t *at = &team.shares[share].ticket;
  uint64_t ticket = atomic_load_explicit(at, memory_order_acquire);
  uint32_t first = (uint32_t)ticket;
  if (first == SHUT) return 0;
  job_fn work = atomic_load_explicit(&team.work, memory_order_relaxed);
  void *job = atomic_load_explicit(&team.job, memory_order_relaxed);
  int64_t n = atomic_load_explicit(&team.n, memory_order_relaxed);
  int64_t grain = atomic_load_explicit(&team.grain, memory_order_relaxed);
  int size = atomic_load_explicit(&team.size, memory_order_relaxed);
  int64_t end = share_end(n, share, size);
  if (worker >= size || first >= end) return 0;
  int64_t last = first + grain < end ? first + grain : end;
  uint64_t next = (ticket & ~(uint64_t)0xffffffffu) | (uint64_t)last;
  atomic_thread_fence(memory_order_acquire);
  if (!atomic_compare_exchange_strong(at, &ticket, next)) return 1;  // another worker took it: look again
  work(job, first, last, worker);
  atomic_fetch_add_explicit(&team.done, last - first, memory_order_release);
  return 1;
}

// Takes items from the worker's own share, else from the next share that has any.
static int take(int worker) {
  int size = atomic_load_explicit(&team.size, memory_order_relaxed);
  for (int i = 0; i < size; i++)
    if (take_from((worker + i) % size, worker)) return 1;
  return 0;
}

static int is_open(int worker) {
  int size = atomic_load(&team.size);
  for (int share = 0; share < size; share++) {
    uint32_t first = (uint32_t)atomic_load(&team.shares[share].ticket);
    if (first != SHUT && first < share_end(atomic_load(&team.n), share, size)) return worker < atomic_load(&team.size);
  }
  return 0;
}

static void sleep_until_open(int worker) {
  pthread_mutex_lock(&sleep_lock);
  atomic_fetch_add(&team.asleep, 1);
  while (!is_open(worker)) pthread_cond_wait(&wakeup, &sleep_lock);
  atomic_fetch_sub(&team.asleep, 1);
  pthread_mutex_unlock(&sleep_lock);
}

static void *help(void *number) {
  int worker = (int)(intptr_t)number;
  for (;;) {
    int64_t until = now_ns() + spin_ns;
    for (int look = 1;; look++) {
      if (take(worker)) {
        until = now_ns() + spin_ns;
      } else if (look % PATIENCE == 0 && now_ns() > until) {
        break;
      } else {
        RELAX();
      }
    }
    sleep_until_open(worker);
  }
  return 0;
}

static void wake_helpers(void) {
  if (!atomic_load(&team.asleep)) return;
  pthread_mutex_lock(&sleep_lock);
  pthread_cond_broadcast(&wakeup);
  pthread_mutex_unlock(&sleep_lock);
}

// Waits for all items. A helper that lost its core in the middle of an item gets the caller's core once that sleeps.
static void wait_for(int64_t n) {
  struct timespec moment = {0, 20000};
  int64_t until = 0;
  for (int look = 1; atomic_load_explicit(&team.done, memory_order_acquire) < n; look++) {
    RELAX();
    if (look % PATIENCE) continue;
    if (!until) until = now_ns() + 100000;
    else if (now_ns() > until) nanosleep(&moment, 0);
  }
}

void team_run(job_fn work, void *job, int64_t n, int64_t grain, int size) {
  if (n <= grain || n >= SHUT || !helpers || pthread_mutex_trylock(&busy)) {
    if (n > 0) work(job, 0, n, 0);
    return;
  }
  atomic_thread_fence(memory_order_release);  // a helper that sees a field below sees that the tickets were shut
  if (size > helpers + 1) size = helpers + 1;
  atomic_store_explicit(&team.work, work, memory_order_relaxed);
  atomic_store_explicit(&team.job, job, memory_order_relaxed);
  atomic_store_explicit(&team.n, n, memory_order_relaxed);
  atomic_store_explicit(&team.grain, grain, memory_order_relaxed);
  atomic_store_explicit(&team.size, size, memory_order_relaxed);
  atomic_store_explicit(&team.done, 0, memory_order_relaxed);
  jobs++;
  for (int share = 0; share < size; share++)
    atomic_store(&team.shares[share].ticket, jobs << 32 | (uint64_t)share_end(n, share - 1, size));
  wake_helpers();
  while (take(0)) {
  }
  wait_for(n);
  for (int share = 0; share < size; share++) atomic_store(&team.shares[share].ticket, jobs << 32 | SHUT);
  pthread_mutex_unlock(&busy);
}

int team_start(int size, int patience_us) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_mutex_lock(&busy);
  if (!helpers)
    for (int share = 0; share <= MOST; share++) atomic_store(&team.shares[share].ticket, SHUT);
  spin_ns = (int64_t)patience_us * 1000;
  pthread_sigmask(SIG_SETMASK, &all, &before);  // Python's threads handle signals
  while (helpers + 1 < size && helpers < MOST) {
    pthread_t thread;
    if (pthread_create(&thread, 0, help, (void *)(intptr_t)(helpers + 1))) break;
    pthread_detach(thread);
    helpers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, 0);
  pthread_mutex_unlock(&busy);
  return size < helpers + 1 ? size : helpers + 1;
}

// The same with OpenMP, for steps in which PyTorch's own loops use its threads too: one pool serves both.
void openmp_run(job_fn work, void *job, int64_t n, int64_t grain, int size) {
  int64_t parts = (n + grain - 1) / grain;
  (void)size;
#pragma omp parallel for schedule(dynamic, 1) num_threads(size) if (parts > 1)
  for (int64_t part = 0; part < parts; part++) {
    int worker = 0;
#ifdef _OPENMP
    worker = omp_get_thread_num();
#endif
    int64_t first = part * grain;
    work(job, first, first + grain < n ? first + grain : n, worker);
  }
}

int openmp_start(int size) {
#ifdef _OPENMP
  return size;
#endif
  return 1;
}
