// A file that is checksummed as it is written (hytrain/summed_file.h).
#include "hytrain/summed_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>

#include "hytrain/crc32.h"

namespace hytrain {
namespace {

constexpr std::size_t kAlignment = 4096;  // at least a disk's sector and the file system's block
constexpr std::size_t kPiece = std::size_t{64} << 10;  // in the core's cache until it is copied
constexpr std::size_t kLeastDirect = std::size_t{256} << 10;
constexpr std::uint64_t kWriteback = std::uint64_t{64} << 20;

struct Unused {
    std::mutex mutex;
    std::vector<char*> buffers;
};

Unused& unused() {
    // Never destroyed: a thread that saves may still run when the process ends.
    static Unused* const kept = new Unused;
    return *kept;
}

[[noreturn]] void fail(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

WriteBuffer::WriteBuffer() {
    {
        Unused& kept = unused();
        std::lock_guard<std::mutex> lock(kept.mutex);
        if (!kept.buffers.empty()) {
            data_ = kept.buffers.back();
            kept.buffers.pop_back();
            return;
        }
    }
    void* memory =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<char*>(memory);
}

WriteBuffer::~WriteBuffer() {
    try {
        Unused& kept = unused();
        std::lock_guard<std::mutex> lock(kept.mutex);
        kept.buffers.push_back(data_);
    } catch (...) {
        munmap(data_, kBytes);
    }
}

void WriteBuffer::trim() {
    Unused& kept = unused();
    std::lock_guard<std::mutex> lock(kept.mutex);
    for (char* memory : kept.buffers) munmap(memory, kBytes);
    kept.buffers.clear();
}

std::uint32_t SummedFile::write(const void* data, std::size_t bytes) {
    const char* at = static_cast<const char*>(data);
    std::uint32_t sum = 0;
    while (bytes != 0) {
        const std::size_t in_block = static_cast<std::size_t>(num_bytes_ % kBlockBytes);
        const std::size_t n =
            std::min({bytes, kPiece, WriteBuffer::kBytes - used_, kBlockBytes - in_block});
        const std::uint32_t piece = crc32(0, at, n);
        sum = crc32_joined(sum, piece, n);
        sum_ = crc32_joined(sum_, piece, n);
        std::memcpy(buffer_.data() + used_, at, n);
        at += n;
        bytes -= n;
        used_ += n;
        num_bytes_ += n;
        if (in_block + n == kBlockBytes) {
            blocks_.push_back(sum_);
            sum_ = 0;
        }
        if (used_ == WriteBuffer::kBytes) {
            set_direct(true);
            hand_over(used_);
            used_ = 0;
        }
    }
    return sum;
}

void SummedFile::flush() {
    if (used_ == 0) return;
    const std::size_t aligned = used_ - used_ % kAlignment;
    // Bytes after a flush may begin at an offset where direct writes are impossible.
    std::size_t done = 0;
    if (aligned >= kLeastDirect && handed_over_ % kAlignment == 0) {
        set_direct(true);
        hand_over(aligned);
        done = aligned;
    }
    if (done != used_) {
        std::memmove(buffer_.data(), buffer_.data() + done, used_ - done);
        used_ -= done;
        set_direct(false);
        can_be_direct_ = false;
        hand_over(used_);
    }
    used_ = 0;
}

// Writes the buffer's first bytes.
void SummedFile::hand_over(std::size_t bytes) {
    std::size_t done = 0;
    while (done != bytes) {
        const ssize_t count = ::write(descriptor_, buffer_.data() + done, bytes - done);
        if (count < 0) {
            if (errno == EINTR) continue;
            if (errno == EINVAL && is_direct_) {
                // The file system accepts the flag, but not this write.
                set_direct(false);
                can_be_direct_ = false;
                continue;
            }
            fail("write");
        }
        done += static_cast<std::size_t>(count);
        if (done % kAlignment != 0 && is_direct_) set_direct(false);  // a full disk, or a signal
    }
    const std::uint64_t begin = handed_over_;
    handed_over_ += bytes;
    if (!is_direct_) begin_writeback(begin, handed_over_);
}

void SummedFile::set_direct(bool direct) {
    if (direct == is_direct_ || (direct && !can_be_direct_)) return;
    const int flags = fcntl(descriptor_, F_GETFL);
    if (flags < 0) fail("fcntl");
    if (fcntl(descriptor_, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) < 0) {
        if (!direct) fail("fcntl");
        can_be_direct_ = false;
        return;
    }
    is_direct_ = direct;
}

// Starts writing page-cached bytes to the disk now, not only when a large file is complete. Waits
// for bytes that were handed over some time ago, so that never much of them is in memory.
void SummedFile::begin_writeback(std::uint64_t begin, std::uint64_t end) {
#if defined(SYNC_FILE_RANGE_WRITE)
    const auto range = [&](std::uint64_t from, std::uint64_t to, unsigned flags) {
        const int result = sync_file_range(descriptor_, static_cast<off64_t>(from),
                                           static_cast<off64_t>(to - from), flags);
        // A disk's error is reported once: ignored here, fsync would not report it again.
        if (result != 0 && errno != EINVAL && errno != ENOSYS && errno != ESPIPE) {
            fail("sync_file_range");
        }
    };
    if (end - begin < WriteBuffer::kBytes) return;  // fsync comes next
    range(begin, end, SYNC_FILE_RANGE_WRITE);
    if (end > written_back_ + kWriteback) {
        const std::uint64_t until = end - kWriteback;
        range(written_back_, until,
              SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
        written_back_ = until;
    }
#else
    static_cast<void>(begin);
    static_cast<void>(end);
#endif
}

std::vector<std::uint32_t> SummedFile::sums() const {
    std::vector<std::uint32_t> found = blocks_;
    if (num_bytes_ % kBlockBytes != 0) found.push_back(sum_);
    return found;
}

}  // namespace hytrain
