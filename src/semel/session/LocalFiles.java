package semel.session;

import java.io.FileNotFoundException;
import java.io.IOException;
import java.net.URI;
import java.net.URISyntaxException;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.nio.file.NoSuchFileException;
import java.nio.file.StandardCopyOption;

import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.ChecksumFs;
import org.apache.hadoop.fs.DelegateToFileSystem;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FsServerDefaults;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.local.LocalConfigKeys;
import org.apache.hadoop.fs.permission.FsPermission;

/**
 * What Spark's checkpoint manager sees of a local disk: Hadoop's LocalFs, without a process for each permission.
 *
 * Hadoop starts `chmod` where its native library is missing, and PySpark brings none. Here the JVM sets permissions
 * itself. And a name is given in one step: Hadoop looks whether it is there and then renames, so that two drivers may
 * both be told that `offsets/7` is theirs; to replace a file it removes the old one first. Everything else is Hadoop's
 * own code: the files are the same, with the same checksums beside them (`.7.crc`).
 *
 * It is compiled by Janino, the compiler that Spark uses for its queries: no lambda, no diamond, no multi-catch.
 */
public class LocalFiles extends ChecksumFs {

    public LocalFiles(URI uri, Configuration conf) throws IOException, URISyntaxException {
        super(new Raw(uri, conf));
    }

    /** A folder is renamed as Hadoop does it; Spark renames files. */
    public void renameInternal(Path src, Path dst, boolean overwrite) throws IOException {
        java.nio.file.Path from = local(src);
        java.nio.file.Path to = local(dst);
        if (Files.isDirectory(from, new LinkOption[0]) || Files.isDirectory(to, new LinkOption[0])) {
            super.renameInternal(src, dst, overwrite);
            return;
        }
        java.nio.file.Path checksum = local(getChecksumFile(dst));
        try {
            from.getFileSystem().provider().checkAccess(from);
            if (overwrite) {
                // A checksum that outlives its content would make the new content unreadable where it is compared.
                Files.deleteIfExists(checksum);
                Files.move(from, to, REPLACING);
            } else {
                give(from, to, checksum);
            }
            java.nio.file.Path ours = local(getChecksumFile(src));
            if (Files.exists(ours, new LinkOption[0])) {
                Files.move(ours, checksum, REPLACING);
            }
        } catch (NoSuchFileException gone) {
            throw notFound(gone, src, dst);
        }
    }

    public void renameInternal(Path src, Path dst) throws IOException {
        renameInternal(src, dst, false);
    }

    private static final java.nio.file.CopyOption[] REPLACING = {
        StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING
    };

    /** Of several who want the same name one gets it: link(2) fails if it is there. */
    private static void give(java.nio.file.Path from, java.nio.file.Path to, java.nio.file.Path checksum)
            throws IOException {
        // A dangling link is a name, too.
        if (Files.exists(to, NOFOLLOW)) {
            throw taken(from, to);
        }
        // Whoever is quicker from here on loses their checksum at most, and a file without one is read unasked.
        Files.deleteIfExists(checksum);
        try {
            Files.createLink(to, from);
        } catch (java.nio.file.FileAlreadyExistsException there) {
            // NFS may say so of a link that it has made and was asked for twice.
            if (!Files.isSameFile(from, to)) {
                throw taken(from, to);
            }
        } catch (NoSuchFileException gone) {
            throw gone;
        } catch (UnsupportedOperationException noLinks) {
            renameUnlessThere(from, to);
            return;
        } catch (java.nio.file.FileSystemException noLinks) {
            // A disk without hard links (vfat, some of FUSE). If it is another error, the rename says so.
            renameUnlessThere(from, to);
            return;
        }
        Files.deleteIfExists(from);
    }

    private static final LinkOption[] NOFOLLOW = {LinkOption.NOFOLLOW_LINKS};

    /** Two steps, as Hadoop does it everywhere. */
    private static void renameUnlessThere(java.nio.file.Path from, java.nio.file.Path to) throws IOException {
        if (Files.exists(to, NOFOLLOW)) {
            throw taken(from, to);
        }
        Files.move(from, to, REPLACING);
    }

    private static IOException taken(java.nio.file.Path from, java.nio.file.Path to) {
        return new FileAlreadyExistsException("rename destination " + to + " already exists; the source is " + from);
    }

    private static IOException notFound(NoSuchFileException gone, Path src, Path dst) {
        String what = "rename " + src + " to " + dst + ": no such file: " + gone.getMessage();
        FileNotFoundException error = new FileNotFoundException(what);
        error.initCause(gone);
        return error;
    }

    private java.nio.file.Path local(Path path) {
        return ((Raw) getMyFs()).files.pathToFile(path).toPath();
    }

    /** Hadoop's RawLocalFs, over files whose permissions are set in here. */
    private static class Raw extends DelegateToFileSystem {

        final RawFiles files;

        Raw(URI uri, Configuration conf) throws IOException, URISyntaxException {
            this(uri, conf, new RawFiles());
        }

        private Raw(URI uri, Configuration conf, RawFiles files) throws IOException, URISyntaxException {
            super(uri, files, conf, "file", false);
            this.files = files;
        }

        public int getUriDefaultPort() {
            return -1;
        }

        public FsServerDefaults getServerDefaults() throws IOException {
            return LocalConfigKeys.getServerDefaults();
        }

        public FsServerDefaults getServerDefaults(Path path) throws IOException {
            return LocalConfigKeys.getServerDefaults();
        }

        /** Which names are good is the disk's to say. */
        public boolean isValidName(String src) {
            return true;
        }
    }

    private static class RawFiles extends RawLocalFileSystem {

        /** As chmod(1) does it: a folder keeps that its files belong to its group. */
        public void setPermission(Path path, FsPermission permission) throws IOException {
            java.nio.file.Path file = pathToFile(path).toPath();
            try {
                int kept = 0;
                if (Files.isDirectory(file, new LinkOption[0])) {
                    kept = ((Integer) Files.getAttribute(file, "unix:mode", new LinkOption[0])).intValue() & SET_IDS;
                }
                Files.setAttribute(file, "unix:mode", Integer.valueOf(permission.toShort() | kept), new LinkOption[0]);
            } catch (NoSuchFileException gone) {
                throw new FileNotFoundException(String.valueOf(gone.getMessage()));
            } catch (UnsupportedOperationException notUnix) {
                super.setPermission(path, permission);
            }
        }

        private static final int SET_IDS = 06000;

        /** Hadoop asks the program `readlink` of every file. */
        public FileStatus getFileLinkStatus(Path path) throws IOException {
            boolean isLink = Files.isSymbolicLink(pathToFile(path).toPath());
            return isLink ? super.getFileLinkStatus(path) : getFileStatus(path);
        }
    }
}
