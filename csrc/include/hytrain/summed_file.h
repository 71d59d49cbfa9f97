// A file that is written from its beginning to its end, and summed as it is: without the GIL, past
// the system's page cache where the file system can do that.
//
// A page-cached byte is copied by the kernel into a page that it has to find first, and written
// from there by threads of the kernel: five times the CPU time of a direct write, which training
// beside a save lacks. A direct write needs aligned memory. So bytes are collected in a buffer,
// which stays in the cores' cache, and are summed on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hytrain {

// Pages of these bytes for a while; those that are given back serve the next file.
class WriteBuffer {
   public:
    static constexpr std::size_t kBytes = std::size_t{2} << 20;

    WriteBuffer();  // throws std::bad_alloc
    ~WriteBuffer();
    WriteBuffer(const WriteBuffer&) = delete;
    WriteBuffer& operator=(const WriteBuffer&) = delete;
    char* data() const { return data_; }

    // Gives the memory back that no file has.
    static void trim();

   private:
    char* data_;
};

class SummedFile {
   public:
    // Of each so many bytes of the file there is a sum.
    static constexpr std::size_t kBlockBytes = std::size_t{1} << 20;

    // `descriptor` is at the file's beginning and stays the caller's.
    explicit SummedFile(int descriptor) : descriptor_(descriptor) {}

    // Appends; returns the CRC-32 of these bytes. Throws std::system_error where they, or bytes
    // before them, could not be written: the file is of no use then.
    std::uint32_t write(const void* data, std::size_t bytes);

    // Whether so many bytes more stay in the buffer: then write waits for no disk.
    bool stays(std::size_t bytes) const { return used_ + bytes < WriteBuffer::kBytes; }

    // Hands all to the system; only then may others read the file, or sync it.
    void flush();

    std::uint64_t num_bytes() const { return num_bytes_; }
    // Of each block; the last one's of what it has so far.
    std::vector<std::uint32_t> sums() const;

   private:
    void hand_over(std::size_t bytes);
    void set_direct(bool direct);
    void begin_writeback(std::uint64_t begin, std::uint64_t end);

    int descriptor_;
    WriteBuffer buffer_;
    std::size_t used_ = 0;  // of the buffer
    std::uint64_t num_bytes_ = 0;
    std::uint64_t handed_over_ = 0;
    std::uint64_t written_back_ = 0;
    std::vector<std::uint32_t> blocks_;
    std::uint32_t sum_ = 0;  // of the last block
    bool is_direct_ = false;
    bool can_be_direct_ = true;
};

}  // namespace hytrain
