#include "team.h"

#include <new>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#define SASH_FORKS 1
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace sash {
namespace {

constexpr uint64_t CLOSED = 0xffffffffu;  // as the next piece: there is none to take
constexpr int SPINS = 2000;               // looks for work before other threads may have the core: some 30 µs
constexpr int YIELDS = 3000;              // more of them before a helper sleeps: about a millisecond

// Waits are short while every thread has a core of its own; when not, another one needs this core.
void rest(int spins) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
  if (spins > SPINS) std::this_thread::yield();
}

#if defined(__linux__)
// The processors of the thread that asks first: the process's, before anything was pinned.
cpu_set_t all_processors() {
  static const cpu_set_t set = [] {
    cpu_set_t now;
    CPU_ZERO(&now);
    pthread_getaffinity_np(pthread_self(), sizeof now, &now);
    return now;
  }();
  return set;
}
#endif

void move_to(const std::vector<int>& processors, int number) {
#if defined(__linux__)
  cpu_set_t set = all_processors();
  if (!processors.empty()) {
    CPU_ZERO(&set);
    if (number > 0) CPU_SET(processors[number % processors.size()], &set);
    else for (int processor : processors) CPU_SET(processor, &set);
  }
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
  (void)processors, (void)number;
#endif
}

}  // namespace

// Never destroyed: helpers outlive everything but the process.
Team& Team::the() {
  static Team& team = *[] {
    Team* made = new Team;
#if defined(SASH_FORKS)
    pthread_atfork([] { the().turn_.lock(), the().bed_.lock(); }, [] { the().bed_.unlock(), the().turn_.unlock(); },
                   [] { the().orphan(); });
#endif
    return made;
  }();
  return team;
}

// In a child, where of all the parent's threads only the one that forked goes on; it holds both locks.
void Team::orphan() {
  helpers_ = 0;
  asleep_.store(0, std::memory_order_relaxed);
  // Made anew where it is: the old one waits for its sleepers, who aren't here, to wake.
  new (&bell_) std::condition_variable;
  bed_.unlock();
  turn_.unlock();
}

void Team::open(int threads) {
  for (; helpers_ < threads - 1; helpers_++) std::thread(&Team::help, this, helpers_ + 1).detach();
  const bool more = threads > threads_;
  threads_ = threads;
  wanted_.store(threads - 1, std::memory_order_seq_cst);
  settle(0);
  if (more) {
    // Those who weren't wanted sleep without being counted.
    std::lock_guard<std::mutex> lock(bed_);
    bell_.notify_all();
  } else if (threads > 1) {
    wake();
  }
}

void Team::pin(const std::vector<int>& processors) {
  Team& team = the();
  std::lock_guard<std::mutex> turn(team.turn_);
  std::lock_guard<std::mutex> lock(team.bed_);
#if defined(__linux__)
  all_processors();
#endif
  team.processors_ = processors;
  team.pinned_.fetch_add(1, std::memory_order_release);
}

// Move this thread to its processor where that has changed since it last looked.
void Team::settle(int number) {
  static thread_local int seen = 0;
  const int now = pinned_.load(std::memory_order_acquire);
  if (seen == now) return;
  std::lock_guard<std::mutex> lock(bed_);
  move_to(processors_, number);
  seen = now;
}

void Team::wake() {
  if (!asleep_.load(std::memory_order_seq_cst)) return;
  std::lock_guard<std::mutex> lock(bed_);
  bell_.notify_all();
}

void Team::run(int64_t pieces, Call call, void* context) {
  // Closed while the job changes, so that nobody takes a piece of half a job.
  const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(job << 32 | CLOSED, std::memory_order_release);
  done_.store(0, std::memory_order_release);
  call_.store(call, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  pieces_.store(pieces, std::memory_order_release);
  ticket_.store(job << 32, std::memory_order_seq_cst);
  wake();
  while (take()) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) < pieces; spins++) rest(spins);
}

void Team::help(int number) {
  int spins = 0;
  while (true) {
    settle(number);
    if (number <= wanted_.load(std::memory_order_relaxed) && take()) {
      spins = 0;
      continue;
    }
    rest(spins++);
    if (spins < SPINS + YIELDS) continue;
    std::unique_lock<std::mutex> lock(bed_);
    const bool wanted = number <= wanted_.load(std::memory_order_seq_cst);
    if (wanted) asleep_.fetch_add(1, std::memory_order_seq_cst);
    // Work that was handed out before this thread counted as asleep has rung no bell.
    const int64_t piece = static_cast<int64_t>(ticket_.load(std::memory_order_seq_cst) & CLOSED);
    if (!wanted || piece >= pieces_.load(std::memory_order_acquire)) bell_.wait(lock);
    if (wanted) asleep_.fetch_sub(1, std::memory_order_seq_cst);
    spins = 0;
  }
}

// Do one piece of the present job; false when none is left.
bool Team::take() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  const int64_t piece = static_cast<int64_t>(ticket & CLOSED);
  if (piece >= pieces_.load(std::memory_order_acquire)) return false;
  const Call call = call_.load(std::memory_order_acquire);
  void* const context = context_.load(std::memory_order_acquire);
  // Success: nobody took this piece, and no other job was opened, since the ticket was read.
  if (!ticket_.compare_exchange_strong(ticket, ticket + 1, std::memory_order_acq_rel)) return true;
  call(context, piece);
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

}  // namespace sash
